"""Many runs of one plan, each with the canary or without, and what the attacker keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietgrad.auditing.contribution import contribution
from quietgrad.auditing.report import Kind
from quietgrad.auditing.scores.flat import Layout
from quietgrad.auditing.scores.whitening import Whitener, participations
from quietgrad.auditing.stage import Stage
from quietgrad.auditing.verdicts import SharedVerdict
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.tensors import trainable_parameters

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trials:
    """What is left of the runs.

    Attributes:
        present: [runs] whether the canary was there.
        products: [runs, participations, parameters] inner products of (whitened) residual and
            canary's contribution, in units of (sigma C)^2.
        energies: [runs, participations, parameters] squared norms of the contribution's part in
            each parameter, in the same units.
    """

    present: NDArray[np.bool_]
    products: Floats
    energies: Floats

    def at(self, index: NDArray[np.int64]) -> Trials:
        return Trials(self.present[index], self.products[index], self.energies[index])


def run_trials(
    plan: PrivacyPlan,
    stage: Stage,
    coins: NDArray[np.bool_],
    kind: Kind,
    direction: Mapping[str, Tensor],
) -> Trials:
    """One run of the plan a coin. Cost: three clip calls and one release a step."""
    layout = Layout(trainable_parameters(stage.model))
    if set(direction) != set(layout.names):
        raise ValueError(
            f"direction names {sorted(direction)}, the trainable parameters are "
            f"{sorted(layout.names)}; give a gradient for each"
        )
    given = _long_enough(direction, 2 * plan.max_grad_norm)
    steps = participations(plan, plan.dataset_size - 1)
    whitener = Whitener(plan)
    weights = torch.tensor(
        [[whitener.weight(int(t), j) for j in range(plan.steps)] for t in steps],
        dtype=torch.float64,
    )
    lengths = np.array([whitener.variance(int(t)) for t in steps])[:, None]
    unit = (plan.noise_multiplier * plan.max_grad_norm) ** 2
    plans = {True: plan, False: without_last(plan)}
    verdict = SharedVerdict(plan, stage)
    shape = (len(coins), len(steps), len(layout.names))
    products, energies = np.zeros(shape), np.zeros(shape)
    for i, present in enumerate(coins):
        residuals, contributions = _one_run(
            plans[bool(present)], stage, verdict, bool(present), kind, given, layout
        )
        white = weights @ residuals
        chosen = contributions[torch.from_numpy(steps)]
        products[i] = np.add.reduceat((white * chosen).numpy(), layout.starts, axis=1) / unit
        energies[i] = (
            np.add.reduceat((chosen * chosen).numpy(), layout.starts, axis=1) * lengths / unit
        )
    return Trials(coins, products, energies)


def without_last(plan: PrivacyPlan) -> PrivacyPlan:
    """The same mechanism on one record fewer: rate, noise and divisor are public settings and stay.
    The only record of a data set cannot be taken out; its place then stays, empty.
    """
    if plan.dataset_size == 1:
        return plan
    size, sampler = plan.dataset_size - 1, plan.sampler
    parts = None if sampler.parts is None else sampler.parts[:-1]
    users = None if sampler.users is None else sampler.users.without_last()
    fewer = replace(sampler, dataset_size=size, parts=parts, users=users)
    return replace(plan, dataset_size=size, sampler=fewer)


def _one_run(
    plan: PrivacyPlan,
    stage: Stage,
    verdict: SharedVerdict,
    present: bool,
    kind: Kind,
    given: Mapping[str, Tensor],
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """[steps, size] releases without the other records' part, and the contribution that the canary
    had or would have had; float64.
    """
    residuals = torch.zeros(plan.steps, layout.size, dtype=torch.float64)
    contributions = torch.zeros_like(residuals)
    canary = stage.known
    with plan.start() as run:
        verdict.serve(run)
        for step, batch in enumerate(run.batches()):
            drawn = getattr(batch, "users", batch)
            others = torch.from_numpy(drawn[drawn != canary])
            known = _clip(run, stage, others, False) if len(others) or len(drawn) == 0 else None
            alone = (
                contribution(run, given)
                if kind == "gradient"
                else _clip(run, stage, others[:0], True)
            )
            total = known
            if len(others) < len(drawn):
                if present and kind == "input":
                    total = _clip(
                        run, stage, others, True
                    )  # in the same micro-batches as the others, as any record
                else:
                    mine = (
                        alone
                        if present
                        else contribution(run, {n: torch.zeros_like(g) for n, g in given.items()})
                    )
                    total = mine if known is None else known + mine
            assert total is not None
            released = layout.flatten(run.release(total).gradients).double()
            residuals[step] = (
                released if known is None else released - layout.flatten(known.gradients)
            )
            contributions[step] = layout.flatten(alone.gradients)
    return residuals, contributions


def _clip(run: PrivateRun, stage: Stage, others: Tensor, with_canary: bool) -> ClippedSum:
    return run.clip(stage.model, stage.per_example_loss, stage.choose(others, with_canary))


def _long_enough(direction: Mapping[str, Tensor], length: float) -> dict[str, Tensor]:
    """One example's gradient, [1, *shape], of norm ``length``."""
    norm = torch.stack([g.double().square().sum() for g in direction.values()]).sum().sqrt()
    if not norm > 0:
        raise ValueError(
            "direction is zero everywhere: a canary without a gradient cannot be found"
        )
    return {name: g.unsqueeze(0) * (length / float(norm)) for name, g in direction.items()}
