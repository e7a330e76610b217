"""What ``plan`` and ``train`` say of the noise: matrix, bands, participation, and predicted error
against independent noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quietgrad.accounting.rounding import round_up

if TYPE_CHECKING:
    from quietgrad.plan import PrivacyPlan


def noise_rows(plan: PrivacyPlan) -> dict[str, str]:
    """Rows of the privacy plan's table."""
    event, size = plan.event, plan.expected_batch_size
    mixing = plan.mixing
    if plan.event.bands == 1 or mixing is None:
        rows = {
            "sampling": f"Poisson, rate {event.sample_rate:.5f}, expected batch size {size:.0f}, "
            f"{plan.steps} steps",
            "noise": f"Gaussian, multiplier {round_up(plan.noise_multiplier, 4)} on the clipping "
            "norm "
            f"{plan.max_grad_norm:g}, independent from step to step",
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
        f"records take turns, rate {event.participation_rate:.5f} within a part, expected "
        "batch size "
        f"{size:.0f}, {plan.steps} steps; a record can be in {event.compositions} of them",
        "noise": f"Gaussian, multiplier {round_up(plan.noise_multiplier, 4)} on the clipping norm "
        f"{plan.max_grad_norm:g}, correlated over {event.bands} bands ({mixing.family}) for "
        f"{mixing.workload}",
        "correlation": f"error {mixing.objective / mixing.independent:.4f} of independent noise's "
        "at the same "
        f"multiplier{_at_the_same_epsilon(plan)}; distance to the best matrix: {gap}",
        **_choice_rows(plan),
    }


def source_rows(plan: PrivacyPlan, entries: int) -> dict[str, str]:
    """What the secure source costs; nothing for the ordinary one.

    Args:
        plan: the privacy plan.
        entries: numbers that train, which all get noise.
    """
    from quietgrad.noise.sources.grid import rounding_cost

    source = plan.noise.source
    if source.grid == 0:
        return {}
    cost = rounding_cost(plan.noise_multiplier, entries, plan.event.bands, source.grid)
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
