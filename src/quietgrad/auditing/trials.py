"""Many runs of one plan, each with the canary or without, and what the attacker keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietgrad.auditing.contribution import absence, contribution
from quietgrad.auditing.report import Kind
from quietgrad.auditing.scores.flat import Layout
from quietgrad.auditing.scores.whitening import Whitener, participations
from quietgrad.auditing.stage import Stage
from quietgrad.auditing.verdicts import SharedVerdict
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.events import SideRelease
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.tensors import trainable_parameters

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trials:
    """What is left of the runs.

    Attributes:
        present: [runs] whether the canary was there.
        products: [runs, participations, parameters] inner products of (whitened) residual and
            canary's contribution, in units of (sigma C)^2; after the parameters, what is released
            beside the gradients, in units of its own noise.
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
    given = _long_enough(direction, 2.0)
    steps = participations(plan, plan.dataset_size - 1)
    whitener = Whitener(plan)
    weights = torch.tensor(
        [[whitener.weight(int(t), j) for j in range(plan.steps)] for t in steps],
        dtype=torch.float64,
        device="cpu",
    )
    lengths = np.array([whitener.variance(int(t)) for t in steps])[:, None]
    plans = {True: plan, False: without_last(plan)}
    verdict = SharedVerdict(plan, stage)
    shape = (len(coins), len(steps), len(layout.names) + len(plan.event.beside))
    products, energies = np.zeros(shape), np.zeros(shape)
    for i, present in enumerate(coins):
        seen = _one_run(plans[bool(present)], stage, verdict, bool(present), kind, given, layout)
        at = torch.from_numpy(steps)
        white, chosen = weights @ seen.residuals, seen.contributions[at]
        beside, added = seen.beside[at], seen.added[at]
        products[i] = np.concatenate(
            (np.add.reduceat((white * chosen).numpy(), layout.starts, axis=1), beside * added), 1
        )
        energies[i] = np.concatenate(
            (
                np.add.reduceat((chosen * chosen).numpy(), layout.starts, axis=1) * lengths,
                added * added,
            ),
            1,
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


@dataclass(frozen=True)
class _Seen:
    """What one run showed, in units of the noise's standard deviation; float64.

    Attributes:
        residuals: [steps, size] releases without the other records' part.
        contributions: [steps, size] what the canary added or would have added.
        beside, added: [steps, side releases] the same of what came beside the gradients.
    """

    residuals: Tensor
    contributions: Tensor
    beside: Tensor
    added: Tensor

    @classmethod
    def nothing(cls, steps: int, size: int, beside: int) -> _Seen:
        shapes = ((steps, size), (steps, size), (steps, beside), (steps, beside))
        return cls(*(torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes))


def _one_run(
    plan: PrivacyPlan,
    stage: Stage,
    verdict: SharedVerdict,
    present: bool,
    kind: Kind,
    given: Mapping[str, Tensor],
    layout: Layout,
) -> _Seen:
    seen = _Seen.nothing(plan.steps, layout.size, len(plan.event.beside))
    canary = stage.known
    with plan.start() as run:
        run.starts.trains = False
        verdict.serve(run)
        for step, batch in enumerate(run.batches()):
            drawn = getattr(batch, "users", batch)
            others = torch.from_numpy(drawn[drawn != canary])
            known = _clip(run, stage, others, False) if len(others) or len(drawn) == 0 else None
            norm = run.max_grad_norm
            alone = (
                contribution(run, {n: g * norm for n, g in given.items()})
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
                    mine = alone if present else absence(run, alone.gradients, 1)
                    total = mine if known is None else known + mine
            assert total is not None
            noisy = run.release(total)
            released = layout.flatten(noisy.gradients).double()
            if known is not None:
                released -= layout.flatten(known.gradients)
            level = plan.noise_multiplier * norm
            seen.residuals[step] = released / level
            seen.contributions[step] = layout.flatten(alone.gradients) / level
            for i, side in enumerate(plan.event.beside):
                if side.name in noisy.beside:
                    others_part = 0.0 if known is None else _part(known, side)
                    seen.beside[step, i] = noisy.beside[side.name] - others_part
                    seen.added[step, i] = _part(alone, side)
                    seen.beside[step, i] /= side.noise_multiplier
                    seen.added[step, i] /= side.noise_multiplier
    return seen


def _part(clipped: ClippedSum, side: SideRelease) -> float:
    """What of a number beside the gradients is of these records."""
    found = clipped.private.beside.get(side.name)
    return 0.0 if found is None else float(found)


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
