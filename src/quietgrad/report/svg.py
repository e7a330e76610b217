"""Figures as SVG that takes its colours from the page around it: light, dark and printed."""

from __future__ import annotations

import io
import re
from typing import Any

from matplotlib.figure import Figure

# Colours that stand for the page's own: replaced in the SVG by its variables.
INK, GRID, CLAIM, ATTACK = "#010203", "#010204", "#010205", "#010206"
VARIABLES = {INK: "--ink", GRID: "--rule", CLAIM: "--claim", ATTACK: "--attack"}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "quietgrad",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def svg(figure: Figure) -> str:
    """The figure as an element of a page: it scales, and its colours are the page's."""
    held = io.StringIO()
    figure.savefig(held, format="svg", transparent=True, metadata={"Date": None})
    text = held.getvalue()
    text = text[text.index("<svg") :]
    for colour, name in VARIABLES.items():
        text = text.replace(colour, f"var({name})")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="img"', text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
