"""One self-contained page of HTML: no file beside it, nothing fetched, nothing that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quietgrad.durable import write_whole

# What a file that this library wrote has near its top: it may be written anew.
PAGE_MARKS = ('<meta name="generator" content="quietgrad">',)
CARD_MARKS = ("\n- quietgrad\n", "\n## Privacy\n\n| | |\n")  # of a finished run, or not
TOP = 4096  # letters
TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Section:
    """A heading and what is below it, in this order; all but the figure is plain text.

    Attributes:
        title: heading.
        lines: paragraphs.
        figure: SVG of this library's own making; "" for none.
        caption: below it.
        square: whether the figure is as high as it is wide.
        rows: (what, in words).
        table: rows of cells, the heads first; the first column is text, others are numbers.
        sign: whether there is a line to sign on.
    """

    title: str
    lines: Sequence[str] = ()
    figure: str = ""
    caption: str = ""
    square: bool = False
    rows: Sequence[tuple[str, str]] = ()
    table: Sequence[Sequence[str]] = ()
    sign: bool = False


def html(
    title: str,
    subtitle: str,
    numbers: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    warnings: Sequence[str] = (),
) -> str:
    """The page. Every text is escaped; figures are this library's own."""
    from jinja2 import Environment, StrictUndefined

    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = made.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=title, subtitle=subtitle, numbers=numbers, sections=sections, warnings=warnings
    )


def write_page(path: str | Path, text: str) -> None:
    """Writes it whole or not at all.

    Raises:
        ValueError: as ``require_page_place``.
    """
    require_page_place(path)
    write_whole(Path(path), text.encode())


def require_page_place(path: str | Path) -> None:
    """Before any work: that a page can be written.

    Raises:
        ValueError: for a name that does not end in .html, a folder that is not there, or a page
            of somebody else's.
    """
    place = Path(path)
    if place.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--html={str(path)!r} must end in .html: the report is one page of HTML")
    if not place.absolute().parent.is_dir():
        raise ValueError(f"--html={str(path)!r}: no such folder; make it first")
    require_ours(place, "--html", PAGE_MARKS)


def require_ours(path: Path, option: str, marks: Sequence[str]) -> None:
    """That nothing is written over but an earlier page, or card, of this library.

    Raises:
        ValueError: where another file is there.
    """
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            top = file.read(TOP)
        if any(mark in top for mark in marks):
            return
    if path.exists():
        raise ValueError(
            f"{option}={str(path)!r} is there already, and quietgrad did not write it; name "
            "another file, or remove it"
        )
