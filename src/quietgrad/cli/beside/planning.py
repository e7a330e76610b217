"""``quietgrad plan``: its options, and which plan they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietgrad.cli import accounting
from quietgrad.cli.beside.scaling import Options, run_devices
from quietgrad.cli.output import announce, one_line
from quietgrad.training.sources.early import look_early

ConfigPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG.toml]", help="Configuration; the embedded default without one."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key; may be repeated."),
]

ExtendSteps = Annotated[
    int | None, typer.Option("--extend-steps", help="So many steps on top of the plan's.")
]
ExtendEpochs = Annotated[
    float | None, typer.Option("--extend-epochs", help="So many passes over records on top.")
]
ExtendTo = Annotated[
    float | None,
    typer.Option("--extend-to-epsilon", help="A new target for the whole run."),
]
DeviceName = Annotated[
    str,
    typer.Option(help="h200, a100-80gb, a100-40gb, l4 or cpu."),
]
Hours = Annotated[float | None, typer.Option(help="With --devices: steps in such a time.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --devices: llama-70b, or a folder.",
    ),
]
Length = Annotated[int | None, typer.Option(help="With --model: tokens a text (2048).")]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", help="With --model: expected (8 a device)."),
]
Lora = Annotated[int | None, typer.Option(help="With --model: rank of adapters.")]
Bands = Annotated[int | None, typer.Option(help="With --model: bands of noise (1).")]
EstimatorName = Annotated[
    str | None,
    typer.Option("--estimator", help="With --model: auto, ghost, hutch:32..."),
]
Checkpointed = Annotated[
    bool, typer.Option("--checkpointing", help="With --model: activations recomputed.")
]
Dtype = Annotated[str | None, typer.Option(help="With --model: bfloat16, or float32.")]
Efficiency = Annotated[float | None, typer.Option(help="With --devices: share of peak (0.4).")]


@one_line
def plan(
    config: ConfigPath = None,
    overrides: Overrides = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure",
            metavar="FILE.png",
            help="Draw how noise.bands was chosen.",
        ),
    ] = None,
    extend_steps: ExtendSteps = None,
    extend_epochs: ExtendEpochs = None,
    extend_to: ExtendTo = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", metavar="N", help="Plan for N devices."),
    ] = None,
    device: DeviceName = "h100-80gb",
    hours: Hours = None,
    model: ModelName = None,
    length: Length = None,
    batch: BatchSize = None,
    lora: Lora = None,
    bands: Bands = None,
    estimator: EstimatorName = None,
    checkpointing: Checkpointed = False,
    dtype: Dtype = None,
    efficiency: Efficiency = None,
    as_json: accounting.AsJson = False,
) -> None:
    """What `train` would run: guarantee, noise, time, memory.

    Trains nothing. With RUN_DIR in place of CONFIG.toml: what more steps of that run would cost.
    With --devices: what a step holds, sends and takes on each of N devices.

    Example: quietgrad plan people.toml --set hours=1
    """
    announce("plan", as_json)
    options = Options(
        *(devices, device, hours, model, length, batch, lora, bands, estimator),
        *(checkpointing, dtype, efficiency),
    )
    if devices is not None:
        if model is None:
            look_early(config, overrides or [])
        run_devices(config, overrides or [], options, as_json)
        return
    options.require_none()
    extend = extend_steps, extend_epochs, extend_to
    if extend != (None, None, None):
        from quietgrad.cli.plan import run_extension

        run_extension(config, overrides or [], figure, extend, as_json)
        return
    look_early(config, overrides or [])
    from quietgrad.cli.plan import run_plan

    run_plan(config, overrides or [], figure, as_json)
