"""``quietgrad plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from quietgrad.accounting.rounding import round_up
from quietgrad.cli.output import console, fail, print_json, print_table, require_place
from quietgrad.cli.prepared import noise_record, prepare_shown, print_guarantee
from quietgrad.training.settings.config import TrainConfig, load_config


def run_plan(
    config_path: Path | None, overrides: list[str], figure: Path | None, as_json: bool
) -> None:
    """See ``quietgrad plan --help``."""
    target = console(as_json)
    config = load_config(config_path, overrides)
    if figure is not None:
        _require_choice_to_draw(config, figure)
    prepared = prepare_shown(config, target)
    from quietgrad.training.forecast import forecast

    record = forecast(prepared)
    if prepared.plan is not None:
        record |= noise_record(prepared.plan)
    if figure is not None and prepared.plan is not None:
        from quietgrad.training.files.noise_state import draw_choice

        draw_choice(prepared.plan, figure)
        record["figure"] = str(figure)
    if as_json:
        print_json(record)
        return
    if prepared.plan is not None:
        print_guarantee(target, prepared, prepared.plan)
    else:
        nothing = (
            "none: with privacy.enabled=false nothing protects the training records, and the "
            "run has no epsilon"
        )
        print_table(target, "Privacy plan", {"guarantee": nothing})
    _print_clipping(target, record)
    print_table(
        target,
        "Forecast (measured on one micro-batch of validation records)",
        {
            "frozen layers": "run once per record, then cached"
            if record["cached_frozen_layers"]
            else "run at every step",
            "training time": f"{'at most about' if 'users' in record else 'about'} "
            f"{record['predicted_seconds']:.0f} s for {prepared.steps} "
            "steps, "
            "evaluations not counted",
            "memory": f"about {record['predicted_memory_mib']:.0f} MiB at the peak",
            "trainable parameters": f"{record['trainable_parameters']:,} of "
            f"{record['parameters']:,}",
            **({} if figure is None else {"figure": str(figure)}),
        },
    )


def _require_choice_to_draw(config: TrainConfig, figure: Path) -> None:
    """Before any work: that there will be a choice of bands, and a place for its figure."""
    require_place(figure)
    bands = getattr(config.noise, "bands", None)
    if bands != "auto" or not config.privacy.enabled:
        noise = config.to_dict()["noise"]
        fail(
            f"--figure draws a choice of bands, and noise.method={noise['method']!r} with "
            f"noise.bands={bands} leaves none; set noise.method=banded (or noisecurve) and "
            "noise.bands=auto",
            2,
        )


def _print_clipping(target: Console, record: dict[str, Any]) -> None:
    """Engine and estimators that the planner chose, beside what it did not choose."""
    if not record["layers"]:
        return
    rows: dict[str, str] = {}
    for layer in record["layers"]:
        row = f"{layer['count']} parameters, {layer['estimator']}"
        if layer["kept"] and layer["estimator"] == "materialized":
            row += ", kept for the sum"
        if layer["multiplications"]:
            row += f", {layer['multiplications']:,} multiplications an example"
        shape = layer["shape"]
        rows[shape] = f"{rows[shape]}\n{row}" if shape in rows else row
    print_table(target, "Norm estimator by shape of parameter", rows)
    rows = {
        "chosen": f"{record['engine']}; {record['physical_batch_size']} examples at a time "
        f"({record['why']})"
    }
    for other in record["alternatives"]:
        rows[other["engine"]] = (
            f"{other['ratio']:.2f} times the non-private step, {other['mib']:,.0f} MiB over "
            "parameters and data, "
            f"{other['physical_batch_size']} examples at a time"
        )
    plain = record["non_private"]
    rows["without privacy"] = (
        f"{plain['seconds']:.3g} s and {plain['mib']:,.0f} MiB for such a batch (modelled)"
    )
    sketch = record["sketch"]
    if "noise_multiplier" in sketch:
        rows["sketching"] = (
            f"hutch with k = {sketch['sketch_dim']} would {_saving(sketch['saves'])} and raise "
            "the noise multiplier from "
            f"{round_up(record['noise_multiplier'], 4)} to "
            f"{round_up(sketch['noise_multiplier'], 4)}"
        )
    print_table(target, "Engines", rows)


def _saving(share: float) -> str:
    if share > 0:
        return f"save {100 * share:.1f} % of the time"
    return f"take {-100 * share:.1f} % more time"
