"""The site: its pages run as they stand, and its reference has every public name, key and command.
Built where mkdocs is installed.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RUN = ("tutorial/first.md", "review.md")


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def command(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from quietgrad.cli import main

    into = arguments[-1] if arguments[-2] == ">" else ""
    arguments = arguments[:-2] if into else arguments
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    progress = "--json" in arguments  # is said beside the object
    assert (ended.value.code or 0) == 0 and (progress or not err), (arguments, err)
    assert out
    if into:
        Path(into).write_text(out)


@pytest.mark.slow("trains, audits and exports as a reader of the tutorial would")
def test_tutorial_and_review_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    for page in RUN:  # the review is of the tutorial's run
        text = (DOCS / page).read_text(encoding="utf-8")
        blocks = re.findall(r"```(python|sh)\n(.*?)```", text, flags=re.DOTALL)
        assert len(blocks) > 1
        for kind, block in blocks:
            if kind == "python":
                exec(compile(block, page, "exec"), {"__name__": "page"})
                continue
            for line in block.splitlines():
                command(shlex.split(line), monkeypatch, capsys)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_reference_has_every_public_name(site: ModuleType) -> None:
    made = site.pages()
    for line in (ROOT / "tests" / "public_names.txt").read_text().split():
        module, _, name = line.rpartition(".")
        if name != "__version__":
            assert re.search(rf"(::: |## ){re.escape(line)}\n", made[f"reference/{module}.md"]), (
                line
            )


def test_the_reference_has_every_key_and_command(site: ModuleType) -> None:
    from quietgrad.cli.app import app
    from quietgrad.cli.settings import chosen

    made = site.pages()
    for setting in chosen(None):
        assert f"| `{setting.key}` |" in made["reference/settings.md"]
    for one in app.registered_commands:
        assert one.callback is not None
        assert f"## quietgrad {one.name or one.callback.__name__}" in made["reference/commands.md"]
    assert "`--html`" in made["reference/commands.md"]


def test_links_out_of_the_pages_become_names(site: ModuleType) -> None:
    given = "see [the run](../src/quietgrad/plan/run.py) and [x](privacy.md#a), [y](../README.md)"
    found = site.outside(given, "page.md")
    assert (
        found == "see the run (`src/quietgrad/plan/run.py`) and [x](privacy.md#a), y (`README.md`)"
    )
    assert site.outside("[a](../auditing.md)", "notes/n.md") == "[a](../auditing.md)"


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")]
    assert [p for p in pages if f" {p}\n" not in listed] == []


def test_links_to_made_pages_lead_to_some(site: ModuleType) -> None:
    made = site.pages()
    for page in DOCS.rglob("*.md"):
        for link in re.findall(
            r"\]\(((?:\.\./)?reference/[^)#]+)", page.read_text(encoding="utf-8")
        ):
            assert link.removeprefix("../") in made, (page.name, link)
