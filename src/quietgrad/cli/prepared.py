"""A run that is ready: prepared with its warnings said, and what is printed of its guarantee."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from rich.console import Console

from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.checks import SettingsWarning
from quietgrad.cli.accounting import DECLARED_PUBLIC
from quietgrad.cli.noise import noise_rows, source_rows
from quietgrad.cli.output import print_table
from quietgrad.events import RELATIONS, RandomizedClipping

if TYPE_CHECKING:
    from quietgrad.noise.correlation.mixing import MixingMatrix
    from quietgrad.plan import PrivacyPlan
    from quietgrad.training.prepare import Prepared
    from quietgrad.training.settings.config import TrainConfig


def prepare_shown(
    config: TrainConfig, target: Console, mixing: MixingMatrix | None = None
) -> Prepared:
    """``prepare``, with its warnings printed, and what was asked for and does not act."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SettingsWarning)
        from quietgrad.training.prepare import prepare

        with target.status("loading data and model, calibrating the noise"):
            prepared = prepare(config, mixing)
    _say_what_is_idle(prepared)
    for warning in caught:
        if issubclass(warning.category, SettingsWarning):  # those of libraries are not for the user
            target.print(f"[yellow]warning:[/yellow] {warning.message}")
    return prepared


def _say_what_is_idle(prepared: Prepared) -> None:
    """So that nobody believes in noise or denoising that does not run."""
    config = prepared.config
    told = config.to_dict()
    noise, denoising = told["noise"]["method"], told["denoising"]["method"]
    delay, found = getattr(config.denoising, "delay", 0), []
    if prepared.plan is None:
        found += [f"noise.method={noise!r}"] if noise != "independent" else []
        found += [f"denoising.method={denoising!r}"] if denoising != "none" else []
        found = [f"{name} is without effect: privacy.enabled=false adds no noise" for name in found]
    elif delay >= prepared.steps:
        found = [
            f"denoising.method={denoising!r} is without effect: it leaves the first {delay} steps "
            f"as they are, and there are {prepared.steps}; set denoising.delay"
        ]
    for sentence in found:
        Console(stderr=True).print(
            f"[bold]Note:[/bold] {sentence}", highlight=False, soft_wrap=True
        )


def print_guarantee(target: Console, prepared: Prepared, plan: PrivacyPlan) -> None:
    """The privacy plan as a table; ``plan`` is the prepared run's."""
    from quietgrad.tensors import trainable_parameters
    from quietgrad.training.files.provenance import start_warnings

    train = prepared.train
    delta_note = (
        ""
        if prepared.config.privacy.target_delta is not None
        else " (1 / N^1.1, at most 0.01: the default)"
    )
    rows = {
        "guarantee": f"epsilon = {round_up(plan.epsilon, 4)} at delta = "
        f"{round_up_to(plan.delta, 3)}{delta_note}, {RELATIONS[plan.neighbouring]}",
        "records": f"{len(train)} {'declared public' if plan.data_are_public else 'private'} for "
        f"training; {len(prepared.validation)} validation and {len(prepared.test)} test, "
        "declared public",
        **noise_rows(plan),
        **source_rows(
            plan, sum(p.numel() for p in trainable_parameters(prepared.model.classifier).values())
        ),
        "clipping": _clipping_text(plan),
    }
    if plan.data_are_public:
        rows["data"] = DECLARED_PUBLIC
    if prepared.started_from:
        rows["start"] = "\n".join(start_warnings(prepared.started_from))
    if plan.seed is not None and not plan.data_are_public:
        rows["seed"] = (
            "given: the noise is reproducible, so the guarantee holds only if the seed stays "
            "secret and serves this run alone"
        )
    print_table(target, "Privacy plan", rows)


def _clipping_text(plan: PrivacyPlan) -> str:
    claim = plan.clipper.claim.clipping
    if not isinstance(claim, RandomizedClipping):
        return f"exact per-example norms ({plan.clipper.estimator})"
    return (
        f"randomized: {plan.clipper.estimator} with k = {claim.sketch_dim}, {claim.envelope} "
        "envelope in the accountant"
    )
