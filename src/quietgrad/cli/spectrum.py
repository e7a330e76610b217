"""``quietgrad spectrum``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from quietgrad.cli.output import console, print_json, print_table
from quietgrad.report.page import require_ours
from quietgrad.report.png import require_figure_place
from quietgrad.training.settings.config import TrainConfig, load_config
from quietgrad.training.settings.overrides import OF_COMPARISONS

# Where a file of weights says which public images it is from.
WEIGHTS_MARKS = ('"__metadata__":{"quietgrad":',)


def run_spectrum(config_path: Path | None, overrides: list[str], as_json: bool) -> None:
    """See ``quietgrad spectrum --help``."""
    target = console(as_json)
    config = load_config(config_path, overrides, ignored=OF_COMPARISONS)
    figure = Path(config.spectrum.output).with_suffix(".png")
    _require_places(config, figure)
    from quietgrad.report.spectrum import spectrum_figure
    from quietgrad.training.spectrum_run import make_spectrum

    made = make_spectrum(config, target.print)
    spectrum, facts = made.spectrum, made.spectrum.facts
    title = (
        f"{facts['parameters']:,} parameters, {facts['hessian_images']:,} public images "
        f"({facts['public']})"
    )
    spectrum_figure(spectrum.top, spectrum.eigenvalues(), title, figure)
    record: dict[str, Any] = {
        "top": [float(v) for v in spectrum.top],
        "largest_residual": float(spectrum.residuals.max()),
        "tail_index": spectrum.tail_index,
        "tail_value": spectrum.tail_value,
        **{name: value for name, value in facts.items() if name != "environment"},
        "spectrum": str(made.spectrum_path),
        "weights": None if made.weights_path is None else str(made.weights_path),
        "figure": str(figure),
    }
    if as_json:
        print_json(record)
        return
    rows = {
        "largest": f"{spectrum.top[0]:.4g}, the {len(spectrum.top)}th {spectrum.top[-1]:.3g} "
        "(residuals "
        f"at most {spectrum.residuals.max():.1e})",
        "positive part": f"sums to {facts['positive_mass']:.4g} \u00b1 "
        f"{facts['positive_mass_error']:.2g}; "
        f"about {facts['positive_count']:.0f} above {facts['count_threshold']:.2g}",
        "negative part": f"sums to {facts['negative_mass']:.4g}; counted as zero",
        "tail": f"ends at rank {spectrum.tail_index:,} with {spectrum.tail_value:g}: there the "
        "fitted "
        "curve has the positive part's sum",
        "spectrum": f"{made.spectrum_path} (noise.spectrum)",
        "weights": "none: the body is frozen"
        if made.weights_path is None
        else f"{made.weights_path} (model.weights)",
        "figure": str(figure),
    }
    print_table(target, "Public spectrum", rows)


def _require_places(config: TrainConfig, figure: Path) -> None:
    """Before any work: that no file of somebody else's is written over.

    Raises:
        ValueError: naming the file.
    """
    table = config.spectrum
    if os.path.lexists(table.output):
        from quietgrad.curvature.spectrum import load_spectrum

        try:
            load_spectrum(table.output)
        except (ValueError, OSError):
            require_ours(Path(table.output), "spectrum.output", ())
    require_ours(Path(table.weights_output), "spectrum.weights_output", WEIGHTS_MARKS)
    require_figure_place(figure, "the figure beside spectrum.output")
