"""The README's figure and table of peers, from benchmarks/results/clipping_peers.json,
clipping_peers_jax.json and noise_peers.json.

python scripts/peers_figure.py             # draws docs/peers.png, prints the tables
python scripts/peers_figure.py --write     # and puts them into README.md and docs/peers.md
python benchmarks/clipping_peers.py        # measures again
python benchmarks/clipping_peers_jax.py    # measures JAX-Privacy again; its head says what it needs
python benchmarks/noise_peers.py           # asks the accountants again
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "clipping_peers.json"
RESULTS_OF_JAX = RESULTS.with_name("clipping_peers_jax.json")
RESULTS_OF_NOISE = RESULTS.with_name("noise_peers.json")
FIGURE = ROOT / "docs" / "peers.png"
REGIMES = {
    "bert-32": "BERT, 64 texts of 32 tokens",
    "llama-512": "Llama, 2 texts of 512 tokens",
    "llama-4096": "Llama, 2 texts of 4096 tokens",
    "llama-lora": "Llama, LoRA, 2 of 512 tokens",
    "resnet18-gn": "ResNet-18, 64 images",
}
METHODS = {
    "quietgrad": "Quietgrad",
    "opacus-ghost": "Opacus ghost",
    "opacus-fast-gradient": "Opacus fast gradient",
    "opacus-hooks": "Opacus hooks",
    "opake": "opake",
    "jax-privacy": "JAX-Privacy",
}
NOISE = {  # -> words, whose colour
    "quietgrad": ("Quietgrad, exact norms", "quietgrad"),
    "quietgrad-hutch++-32": ("Quietgrad, Hutch++ k = 32", "quietgrad"),
    "quietgrad-hutch-32": ("Quietgrad, Hutch k = 32", "quietgrad"),
    "opacus-prv": ("Opacus, PRV", "opacus-ghost"),
    "opacus-rdp": ("Opacus, RDP", "opacus-ghost"),
    "jax-privacy-pld": ("JAX-Privacy, PLD", "jax-privacy"),
    "jax-privacy-rdp": ("JAX-Privacy, RDP", "jax-privacy"),
}
COLOURS = ("#1f5fa8", "#c0504d", "#d98a5f", "#8a5fa8", "#888888", "#3f8f6b")


def regimes_in_jax() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS_OF_JAX.read_text())["regimes"]
    return found


def fastest_in_jax(regime: str) -> dict[str, Any] | None:
    """JAX-Privacy with the whole batch at once or in micro-batches, whichever took least time."""
    methods = regimes_in_jax().get(regime, {"methods": {}})["methods"]
    rows = [row for name, row in methods.items() if name.startswith("jax-privacy")]
    return min(rows, key=lambda row: row["time_ratio"]["median"], default=None)


def numbers(regime: str) -> dict[str, tuple[float, float]]:
    """Method -> (time, added memory), each over the non-private step's; without what failed.

    JAX-Privacy's are over JAX's non-private step, all others' over torch's.
    """
    found: dict[str, Any] = json.loads(RESULTS.read_text())["regimes"][regime]["methods"]
    in_jax = fastest_in_jax(regime)
    if in_jax is not None:
        found["jax-privacy"] = in_jax
    return {
        name: (float(found[name]["time_ratio"]["median"]), float(found[name]["memory_ratio"]))
        for name in METHODS
        if name in found
    }


def table() -> str:
    """In Markdown: time / added memory."""
    lines = ["| | " + " | ".join(METHODS.values()) + " |", "| --- |" + " --- |" * len(METHODS)]
    for regime, words in REGIMES.items():
        found = numbers(regime)
        cells = [
            f"{found[name][0]:.2f} / {found[name][1]:.2f}"
            if name in found
            else "fails"
            if name != "jax-privacy" or regime in regimes_in_jax()
            else "not measured"
            for name in METHODS
        ]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table_of_jax() -> str:
    """In Markdown: seconds of the two non-private steps, and JAX-Privacy's ways."""
    ways = {"jax-privacy": "at once", "jax-privacy-by-8": "by 8", "jax-privacy-by-1": "one by one"}
    heads = ["JAX, not private", "torch, not private", *ways.values()]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for regime, words in REGIMES.items():
        if regime not in regimes_in_jax():
            continue
        entry = regimes_in_jax()[regime]
        cells = [f"{entry['seconds_non_private' + of]:.2f} s" for of in ("", "_torch")]
        for name in ways:
            if name in entry["failed"]:
                cells.append("fails")
            elif name in entry["methods"]:
                row = entry["methods"][name]
                time = "{median:.2f} [{min:.2f}-{max:.2f}]".format(**row["time_ratio"])
                cells.append(f"{time} / {row['memory_ratio']:.2f}")
            else:  # or there are no more records than that
                small = name.endswith("-8") and entry["batch"] <= 8
                cells.append("" if small else "not measured")
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    """Time and added memory, on a logarithmic axis around 1, and the noise for one epsilon."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(12.4, 4.4), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    axes[1].sharey(axes[0])
    axes[1].tick_params(labelleft=False)
    draw_noise(axes[2])
    width = 0.8 / len(METHODS)
    for panel, (axis, title) in enumerate(
        zip(axes[:2], ("time of a step", "memory that a step adds"), strict=True)
    ):
        for place, (name, colour) in enumerate(zip(METHODS, COLOURS, strict=True)):
            known = [
                (i, numbers(r)[name][panel]) for i, r in enumerate(REGIMES) if name in numbers(r)
            ]
            heights = [i + (place - (len(METHODS) - 1) / 2) * width for i, _ in known]
            lengths = [math.log10(value) for _, value in known]
            axis.barh(heights, [10**v - 1 for v in lengths], width, left=1.0, color=colour,
                      label=METHODS[name])  # fmt: skip
        axis.axvline(1.0, color="#222222", linewidth=1)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_title(f"{title}, non-private = 1", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(REGIMES)), [REGIMES[r].replace(", ", ",\n", 1) for r in REGIMES],
                       fontsize=8)  # fmt: skip
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def draw_noise(axis: Any) -> None:
    """Each accountant's noise multiplier over that of exact norms here."""
    found = json.loads(RESULTS_OF_NOISE.read_text())["noise_multipliers"]
    colours = dict(zip(METHODS, COLOURS, strict=True))
    for place, (name, (_, whose)) in enumerate(NOISE.items()):
        ratio = found[name] / found["quietgrad"]
        axis.barh(place, ratio - 1.0, 0.6, left=1.0, color=colours[whose])
        axis.text(ratio + 0.002, place, f"{ratio:.3f}", va="center", fontsize=8)
    axis.axvline(1.0, color="#222222", linewidth=1)
    axis.set_yticks(range(len(NOISE)), [words for words, _ in NOISE.values()], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0.99, 1.12)
    axis.set_title("noise for one epsilon", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def with_table(text: str, fresh: str) -> str:
    """A page with a table in place of the one whose heads are the same.

    Raises:
        ValueError: if the page has none.
    """
    lines, heads = text.splitlines(), fresh.splitlines()[0]
    if heads not in lines:
        raise ValueError(f"the page has no table with the heads {heads}; write its first line")
    start = end = lines.index(heads)
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return "\n".join([*lines[:start], fresh, *lines[end:]]) + "\n"


if __name__ == "__main__":
    draw(FIGURE)
    print(table(), table_of_jax(), sep="\n\n")
    if "--write" in sys.argv[1:]:
        for page, fresh in (
            (ROOT / "README.md", table()),
            (FIGURE.with_suffix(".md"), table_of_jax()),
        ):
            page.write_text(with_table(page.read_text("utf-8"), fresh), "utf-8")
