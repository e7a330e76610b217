"""``quietgrad plan --devices``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from quietgrad.checks import require_at_least, require_positive, require_word
from quietgrad.cli.output import console, one_line, print_json, print_table

if TYPE_CHECKING:
    from quietgrad.scaling.ways.forecast import Asked, PaperOf


@dataclass(frozen=True)
class Options:
    """What the command line says beside the configuration; None where it says nothing."""

    devices: int | None
    device: str = "h100-80gb"
    hours: float | None = None
    model: str | None = None
    length: int | None = None
    batch: int | None = None
    lora: int | None = None
    bands: int | None = None
    estimator: str | None = None
    checkpointing: bool = False
    dtype: str | None = None
    efficiency: float | None = None

    def require_none(self) -> None:
        """Raises where something was said that only a plan for devices hears."""
        if self != Options(None):
            raise ValueError(
                "--device, --hours, --model and what belongs to them ask for a plan on devices: "
                "say how many with --devices N (1 is one)"
            )


@one_line
def run_devices(config: Path | None, overrides: list[str], options: Options, as_json: bool) -> None:
    """See ``quietgrad plan --help``."""
    from quietgrad.scaling.ways import advice
    from quietgrad.scaling.ways.forecast import as_record, ways_of

    target = console(as_json)
    if options.hours is not None:
        require_positive("hours", options.hours)
    if options.model is not None and (config is not None or overrides):
        raise ValueError(
            "--model plans for a shape, and a configuration for its own model; give one of them"
        )
    asked, paper_of, about = (
        _of_config(config, overrides, options, target)
        if options.model is None
        else _of_shape(options)
    )
    ways = ways_of(asked, paper_of)
    best = advice.best_of(ways, asked)
    paper = paper_of(2, "bookkeeping", 1)
    record: dict[str, Any] = {
        "model": about
        | {
            "parameters": sum(p.entries for p in paper.parameters),
            "trainable_parameters": paper.trained_entries,
        },
        "devices": asked.devices,
        "device": {
            "name": asked.device.name,
            "memory_bytes": asked.device.memory,
            "source": asked.device.source,
        },
        "batch": asked.batch,
        "efficiency": asked.efficiency,
        "ways": [as_record(way, asked.device) for way in ways],
        "best": best.name,
        "noise": advice.noise_table(asked, paper_of, best),
        "estimators": advice.estimator_table(asked, paper_of, best),
        "warnings": advice.warnings_of(asked, paper, ways),
    }
    if options.hours is not None:
        record["in_hours"] = advice.in_hours(asked, best, options.hours)
    if asked.steps is not None:
        record["steps"] = asked.steps
        record["run_hours"] = asked.steps * best.step_seconds / 3600
    if as_json:
        print_json(record)
    else:
        _print(target, record)


def _of_shape(options: Options) -> tuple[Asked, PaperOf, dict[str, Any]]:
    from quietgrad.clipping.clipper import Clipper
    from quietgrad.clipping.norms.cost import MODELLED_GPU
    from quietgrad.scaling.paper.models import Tuning, paper_of_shape, parts_of
    from quietgrad.scaling.paper.shapes import shape_of
    from quietgrad.scaling.ways.devices import device_of
    from quietgrad.scaling.ways.forecast import EFFICIENCY, Asked

    device = device_of(options.device)
    assert options.model is not None and options.devices is not None
    _require(options)
    shape = shape_of(options.model)
    length = options.length or 2048
    dtype = options.dtype or device.dtype
    tuning = Tuning(options.lora, dtype, options.checkpointing)
    name, _, size = (options.estimator or "auto").partition(":")
    speed = MODELLED_GPU if device.kind == "cuda" else None
    clipper = Clipper(1.0, name, int(size or 32), speed=speed)  # type: ignore[arg-type]
    if size and not clipper.sketched:
        raise ValueError(
            f"estimator={options.estimator!r} has a number of columns, which {name!r} does not "
            f"take; give {name!r}, or a sketch, such as 'hutch:32'"
        )
    asked = Asked(
        options.devices,
        device,
        options.batch or 8 * options.devices,
        clipper,
        bands=options.bands or 1,
        efficiency=EFFICIENCY if options.efficiency is None else options.efficiency,
        positions=length,
        parts=parts_of(shape, options.devices),
    )
    about = {"name": shape.name, "source": shape.source, "length": length, "dtype": dtype}
    about |= {"lora": options.lora, "checkpointing": options.checkpointing}

    def paper_of(examples: int, engine: Any, parts: int) -> Any:
        cut = replace(tuning, parts=parts)
        return paper_of_shape(shape, cut, examples, length, clipper, engine)

    return asked, paper_of, about


def _require(options: Options) -> None:
    """What is to be a count is one, and words are known."""
    for name in ("length", "batch", "lora", "bands"):
        value = getattr(options, name)
        if value is not None:
            require_at_least(name, value, 1, "give a whole number from 1 on")
    if options.dtype is not None:
        require_word("dtype", options.dtype, ("bfloat16", "float32"))
    _, colon, size = (options.estimator or "").partition(":")
    if colon and not (size.isdecimal() and int(size) > 0):
        raise ValueError(
            f"estimator={options.estimator!r} has no number of columns after its colon; hutch:32 "
            "has"
        )


def _of_config(
    config: Path | None, overrides: list[str], options: Options, target: Console
) -> tuple[Asked, PaperOf, dict[str, Any]]:
    from quietgrad.scaling.paper.models import paper_of_model
    from quietgrad.scaling.ways.devices import device_of
    from quietgrad.scaling.ways.forecast import EFFICIENCY, Asked
    from quietgrad.training.settings.config import load_config

    assert options.devices is not None
    given = {
        "--length": options.length,
        "--batch-size": options.batch,
        "--lora": options.lora,
        "--bands": options.bands,
        "--estimator": options.estimator,
        "--dtype": options.dtype,
    }
    said = [name for name, value in given.items() if value is not None]
    if said or options.checkpointing:
        raise ValueError(
            f"{(said or ['--checkpointing'])[0]} goes with --model; a configuration says it by "
            "its keys (such as --set model.tune=lora --set model.lora_rank=16)"
        )
    from quietgrad.cli.prepared import prepare_shown

    prepared = prepare_shown(load_config(config, overrides), target)
    if prepared.plan is None:
        raise ValueError(
            "privacy.enabled=false: this forecast is of private steps; leave privacy on"
        )
    sample = prepared.sample()
    clipper, noise = prepared.plan.clipper, prepared.plan.noise
    asked = Asked(
        options.devices,
        device_of(options.device),
        max(1, round(prepared.expected_batch_size)),
        clipper,
        bands=noise.bands,
        rows=noise.memory == "rows",
        slots=2 if type(prepared.config.optimizer).__name__ == "AdamW" else 1,
        steps=prepared.steps,
        efficiency=EFFICIENCY if options.efficiency is None else options.efficiency,
        cached=sample.cached,
    )
    batch = sample.as_clipped(False)
    of_model = paper_of_model(sample.model, prepared.loss(), batch, clipper)

    def paper_of(examples: int, engine: Any, parts: int) -> Any:
        return of_model(examples, engine)

    return asked, paper_of, {"name": "of the configuration", "source": "prepared here"}


@dataclass(frozen=True)
class _Unit:
    """Of the sizes that are printed."""

    name: str
    size: float

    def of(self, size: float) -> str:
        return f"{size / self.size:,.2f}"


def _unit(ways: list[dict[str, Any]]) -> _Unit:
    large = max(way["peak_bytes"] for way in ways) >= 1e9
    return _Unit("GB", 1e9) if large else _Unit("MB", 1e6)


def _time(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _grid(target: Console, title: str, head: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", pad_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    target.print(table)


def _print(target: Console, record: dict[str, Any]) -> None:
    model, device = record["model"], record["device"]
    print_table(
        target,
        "Plan",
        {
            "model": f"{model['name']} ({model['source']}), {model['trainable_parameters']:,} of "
            f"{model['parameters']:,} parameters trained"
            + (f", {model['length']} tokens a text" if "length" in model else ""),
            "devices": f"{record['devices']} x {device['name']}",
            "of them": device["source"],
            "batch": f"{record['batch']:,} examples expected in a step",
            "assumed": f"products reach {record['efficiency']:g} of the peak; nothing is measured",
        },
    )
    ways = record["ways"]
    unit = _unit(ways)
    head = [f"{unit.name} on one device", *(way["way"] for way in ways)]
    rows = [["", *(way["runs"] for way in ways)]]
    rows += [
        [name, *(unit.of(way["resident_bytes"][name]) for way in ways)]
        for name in ways[0]["resident_bytes"]
    ]
    rows.append(["activations and factors", *(unit.of(way["activation_bytes"]) for way in ways)])
    rows.append(["most of a step", *(_phase(way, unit) for way in ways)])
    rows.append(["most at once", *(unit.of(way["peak_bytes"]) for way in ways)])
    rows.append(["fits", *("yes" if way["fits"] else "NO" for way in ways)])
    if any(way["tensor_parallel"] > 1 for way in ways):
        rows.append(["devices that share a record", *(str(w["tensor_parallel"]) for w in ways)])
    rows.append(["micro-batches", *(f"{w['micro_batches']} of {w['examples']}" for w in ways)])
    rows.append(["largest that fits", *(str(w["largest_physical_batch"]) for w in ways)])
    rows.append(
        [f"{unit.name} sent a step", *(unit.of(sum(w["sent_bytes"].values())) for w in ways)]
    )
    names = list(dict.fromkeys(name for way in ways for name in way["seconds"]))
    rows += [
        [f"s: {name}", *(f"{way['seconds'].get(name, 0.0):,.3g}" for way in ways)] for name in names
    ]
    rows.append(["a step", *(_time(way["step_seconds"]) for way in ways)])
    _grid(target, "Ways", head, rows)
    _grid(
        target,
        f"Noise ({record['best']}, one device)",
        [
            "bands",
            f"{unit.name} of rows",
            "over the model",
            "fit",
            "s with rows",
            f"s drawn again (step {record['noise'][0]['regenerate_step']})",
        ],
        [
            [
                str(row["bands"]),
                unit.of(row["rows_bytes"]),
                f"{row['rows_over_weights']:.2f}",
                "yes" if row["rows_fit"] else "NO",
                f"{row['rows_seconds']:.3g}",
                f"{row['regenerate_seconds']:.3g}",
            ]
            for row in record["noise"]
        ],
    )
    _grid(
        target,
        f"Norms ({record['best']}, one device)",
        [
            "estimator",
            "s a step",
            "over the plain step",
            f"{unit.name} sent if positions were cut in 8",
        ],
        [
            [
                row["estimator"] + (f" k={row['sketch_dim']}" if row["sketch_dim"] else ""),
                f"{row['seconds']:.3g}",
                f"{row['over_plain_step']:.3f}",
                unit.of(row["context_parallel_bytes"]),
            ]
            for row in record["estimators"]
        ],
    )
    if "in_hours" in record:
        buys = record["in_hours"]
        target.print(
            f"in {buys['hours']:g} hours ({buys['way']}, {buys['runs']}): {buys['steps']:,} steps, "
            f"{buys['examples']:,} examples, {buys['positions']:,} tokens",
            soft_wrap=True,
        )
    if "run_hours" in record:
        target.print(
            f"the configuration's {record['steps']:,} steps take {record['run_hours']:.3g} hours "
            f"({record['best']})",
            soft_wrap=True,
        )
    for warning in record["warnings"]:
        target.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True, markup=True)


def _phase(way: dict[str, Any], unit: _Unit) -> str:
    most = max(way["phase_bytes"], key=lambda name: way["phase_bytes"][name])
    return f"{unit.of(way['phase_bytes'][most])} ({most})"
