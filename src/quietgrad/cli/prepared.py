"""A run that is ready: prepared with its warnings said, and what is printed of its guarantee and
its noise: matrix, bands, participation, predicted error against independent noise.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.checks import SettingsWarning, how_many
from quietgrad.cli.accounting import DECLARED_PUBLIC
from quietgrad.cli.output import print_table
from quietgrad.cli.progress.stages import stages
from quietgrad.events import RELATIONS, RandomizedClipping, unit_of

if TYPE_CHECKING:
    from quietgrad.noise.correlation.mixing import MixingMatrix
    from quietgrad.plan import PrivacyPlan
    from quietgrad.training.prepare import Prepared
    from quietgrad.training.settings.config import TrainConfig


def prepare_shown(
    config: TrainConfig,
    target: Console,
    mixing: MixingMatrix | None = None,
    extend: Callable[[PrivacyPlan | None], PrivacyPlan | None] | None = None,
    beginning: int | None = None,
) -> Prepared:
    """``prepare``, with its warnings printed, and what was asked for and does not act."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SettingsWarning)
        from quietgrad.training.prepare import prepare

        with stages(target) as say:
            prepared = prepare(config, mixing, extend, say, beginning)
    _say_what_is_idle(prepared)
    for warning in caught:
        if issubclass(warning.category, SettingsWarning):  # those of libraries are not for the user
            target.print(f"[yellow]warning:[/yellow] {warning.message}")
    return prepared


def say_choice(target: Console, config: Path | None) -> None:
    """Of a setting that ``quietgrad compare --accounted`` has released: one run more with it looks
    cheaper than the choice was, and adds to that.
    """
    result = None if config is None else config.with_name("result.json")
    if result is None or not result.is_file():
        return
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):  # somebody's own file
        found = json.loads(result.read_text(encoding="utf-8"))
        if isinstance(found, dict) and "selection" in found:
            target.print(
                f"[yellow]warning:[/yellow] {escape(str(config))} is what `quietgrad compare "
                "--accounted` chose. A run with it is one release more on the same records: its "
                f"epsilon and delta add to the choice's ({round_up(found['epsilon'], 4)}, "
                f"{round_up_to(found['delta'], 3)}).",
                soft_wrap=True,
            )


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

    delta_note = (
        ""
        if prepared.config.privacy.target_delta is not None
        else " (1 / N^1.1, at most 0.01: the default)"
    )
    rows = {
        "guarantee": f"epsilon = {round_up(plan.epsilon, 4)} at delta = "
        f"{round_up_to(plan.delta, 3)}{delta_note}, {RELATIONS[plan.neighbouring]}",
        "records": f"{_units(prepared, plan)} for training; {len(prepared.validation)} validation "
        f"and {len(prepared.test)} test records, declared public",
        **noise_rows(plan),
        **source_rows(
            plan, sum(p.numel() for p in trainable_parameters(prepared.model.classifier).values())
        ),
        "clipping": _clipping_text(plan),
        **beside_rows(plan),
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


def _units(prepared: Prepared, plan: PrivacyPlan) -> str:
    declared = "declared public" if plan.data_are_public else "private"
    users = plan.sampler.users
    if users is None:
        return f"{len(prepared.train)} {declared}"
    how = "drawn anew in every step" if users.choice == "fresh" else "always the same ones"
    most = how_many(users.at_most, "record")
    return f"{users.count} users, {declared}, at most {most} of each a step ({how})"


def _clipping_text(plan: PrivacyPlan) -> str:
    claim = plan.clipper.claim.clipping
    combined = plan.clipper.combined
    of = "" if combined is None else f", of the {combined} of a user's gradients"
    if not isinstance(claim, RandomizedClipping):
        return f"exact per-example norms ({plan.clipper.estimator}){of}"
    return (
        f"randomized: {plan.clipper.estimator} with k = {claim.sketch_dim}, {claim.envelope} "
        f"envelope in the accountant{of}"
    )


def noise_rows(plan: PrivacyPlan) -> dict[str, str]:
    """Rows of the privacy plan's table."""
    event, size = plan.event, plan.expected_batch_size
    mixing, unit = plan.mixing, unit_of(plan.neighbouring)
    of = " users" if unit == "user" else ""
    if plan.event.bands == 1 or mixing is None:
        rows = {
            "sampling": f"Poisson, rate {plan.sampler.sample_rate:.5f}, expected batch size "
            f"{size:.0f}{of}, {how_many(plan.steps, 'step')}",
            "noise": f"Gaussian, multiplier {round_up(plan.noise_multiplier, 4)} on the clipping "
            "norm "
            f"{plan.max_grad_norm:g}, independent from step to step",
            **course_rows(plan),
        }
        return rows | _choice_rows(plan)
    gap = (
        "not computed"
        if mixing.relative_gap is None
        else f"at most {100 * mixing.relative_gap:.2g} %"
    )
    if mixing.kkt_residual is not None:
        gap += f" (residual of the optimality conditions {mixing.kkt_residual:.1g})"
    return {
        "sampling": f"cyclic Poisson: {event.bands} parts of about "
        f"{plan.dataset_size / event.bands:.0f} "
        f"{unit}s take turns, rate {event.participation_rate:.5f} within a part, expected "
        "batch size "
        f"{size:.0f}{of}, {how_many(plan.steps, 'step')}; a {unit} can be in "
        f"{event.compositions} of them",
        "noise": f"Gaussian, multiplier {round_up(plan.noise_multiplier, 4)} on the clipping norm "
        f"{plan.max_grad_norm:g}, correlated over {event.bands} bands ({mixing.family}) for "
        f"{mixing.workload}",
        "correlation": f"error {mixing.objective / mixing.independent:.4f} of independent noise's "
        "at the same "
        f"multiplier{_at_the_same_epsilon(plan)}; distance to the best matrix: {gap}",
        **course_rows(plan),
        **_choice_rows(plan),
    }


def beside_rows(plan: PrivacyPlan) -> dict[str, str]:
    """What is released beside the gradients; nothing where nothing is."""
    noise = {side.name: side.noise_multiplier for side in plan.event.beside}
    rows, loss, adaptive = {}, plan.training_loss, plan.adaptive_clipping
    if loss is not None:
        std = noise[loss.name] * loss.width / plan.expected_batch_size
        rows["training loss"] = (
            f"private estimate {_every(loss.every)}: mean of losses clipped to {loss.low:g} .. "
            f"{loss.high:g}, with noise of standard deviation {round_up_to(std, 3)} (multiplier "
            f"{round_up(noise[loss.name], 4)})"
        )
    if adaptive is not None:
        std = noise[adaptive.name] / 2 / plan.expected_batch_size
        rows["adaptive clipping"] = (
            f"from {plan.max_grad_norm:g} on, towards the {adaptive.quantile:g} quantile of the "
            f"norms: {_every(adaptive.every)} a count whose fraction has noise of standard "
            f"deviation {round_up_to(std, 3)} (multiplier {round_up(noise[adaptive.name], 4)})"
        )
    return rows


def _every(steps: int) -> str:
    return "at every step" if steps == 1 else f"every {steps} steps"


def course_rows(plan: PrivacyPlan) -> dict[str, str]:
    """How the settings change, from the first step to the last; nothing where they do not."""
    rows = {}
    if plan.course is not None:
        first, last = plan.at(0), plan.at(plan.steps - 1)
        rows["schedules"] = (
            f"first to last step: noise multiplier {first.noise_multiplier:.4f} to "
            f"{last.noise_multiplier:.4f} (above: the least), clipping norm "
            f"{first.max_grad_norm:.4g} to {last.max_grad_norm:.4g} (above: the first), expected "
            f"batch size {plan.batch_size_at(first):.0f} to {plan.batch_size_at(last):.0f} (above: "
            "the largest); every step is accounted for with its own"
        )
    if len(plan.phase_lengths) > 1:
        rows["phases"] = " + ".join(map(str, plan.phase_lengths)) + " steps"
    return rows


def source_rows(plan: PrivacyPlan, entries: int) -> dict[str, str]:
    """What the secure source costs; nothing for the ordinary one.

    Args:
        plan: the privacy plan.
        entries: numbers that train, which all get noise.
    """
    from quietgrad.noise.sources.grid import rounding_cost, smallest_scale

    source = plan.noise.source
    if source.grid == 0:
        return {}
    least = smallest_scale(plan.clipper.claim)
    cost = rounding_cost(
        plan.whole_course.most_noise, entries, plan.event.bands, source.grid, least
    )
    return {
        "noise source": f"{source.name}: AES-256, on a grid of {source.grid:.2g} standard "
        "deviations; rounding "
        f"{entries:,} entries to it raises the sensitivity by a share of {cost:.2g}, and the "
        "noise is "
        "made larger by as much, so the epsilon stands"
    }


def noise_record(plan: PrivacyPlan) -> dict[str, Any]:
    """The same for ``--json``."""
    record: dict[str, Any] = {
        "bands": plan.event.bands,
        "participation_rate": plan.event.participation_rate,
        "compositions": plan.event.compositions,
        **plan.told_beside(),
    }
    if plan.mixing is not None:
        mixing = plan.mixing
        record |= {
            "workload": mixing.workload,
            "mixing_family": mixing.family,
            "objective": mixing.objective,
            "objective_of_independent_noise": mixing.independent,
            "relative_gap": mixing.relative_gap,
            "kkt_residual": mixing.kkt_residual,
            "predicted_error_ratio": error_ratio(plan),
        }
    if plan.band_choice is not None:
        record["band_candidates"] = [
            {"bands": c.bands, "noise_multiplier": c.noise_multiplier, "error": c.error}
            for c in plan.band_choice.candidates
        ]
    return record


def error_ratio(plan: PrivacyPlan) -> float | None:
    """Predicted error over independent noise's at the same epsilon; None where a noise multiplier
    was given instead. Cost: one search of the accountant for fixed bands.
    """
    if plan.band_choice is not None:
        return float(plan.band_choice.error_ratio)
    independent = plan.multiplier_for(bands=1)
    if independent is None or plan.mixing is None:
        return None
    amplification = plan.noise_multiplier / independent
    return float(amplification**2 * plan.mixing.objective / plan.mixing.independent)


def _at_the_same_epsilon(plan: PrivacyPlan) -> str:
    ratio = error_ratio(plan)
    return (
        ""
        if ratio is None
        else f", {ratio:.4f} at the same epsilon (weaker amplification by sampling counted)"
    )


def _choice_rows(plan: PrivacyPlan) -> dict[str, str]:
    if plan.band_choice is None:
        return {}
    first = plan.band_choice.candidates[0].error
    tried = ", ".join(f"{c.bands}: {c.error / first:.3f}" for c in plan.band_choice.candidates)
    return {
        "bands": f"{plan.band_choice.chosen.bands} chosen from public facts; predicted error "
        "relative "
        f"to independent noise, amplification counted, by bands: {tried}"
    }
