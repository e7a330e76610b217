"""Figures as PNG files: each says that this library drew it, and none is drawn over another's."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from quietgrad.durable import write_whole
from quietgrad.report.page import require_ours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN_BY = "quietgrad"
FIGURE_MARKS = (f"tEXtSoftware\0{DRAWN_BY}",)  # a chunk before the image's own


def save_figure(figure: Figure, path: str | Path, dots_per_inch: int) -> None:
    """Writes it whole or not at all."""
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=dots_per_inch, metadata={"Software": DRAWN_BY})
    write_whole(Path(path), held.getvalue())


def require_figure_place(path: Path, option: str) -> None:
    """Before any work: that no picture of somebody else's is drawn over.

    Raises:
        ValueError: where another file is there.
    """
    require_ours(path, option, FIGURE_MARKS)
