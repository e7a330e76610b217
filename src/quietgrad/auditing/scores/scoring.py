"""Scores of canaries, from one release after the other: log-likelihood ratios of the claimed
mechanism, as if each canary were the only one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.auditing.canaries import Directions
from quietgrad.auditing.contribution import absence, contribution
from quietgrad.auditing.drawn import Drawn
from quietgrad.auditing.scores.flat import Layout
from quietgrad.auditing.scores.whitening import Whitener, log_likelihood_ratio
from quietgrad.clipping.api import per_example_norms
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.capture.examples import UserBatch
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.tensors import Batch, batch_size_of, map_tensors, trainable_parameters

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

EXAMPLES = 512  # canaries that go through the model together
TOO_LONG = 2.0  # canaries' gradients are given in so many C, so that clipping has work to do


class Scores:
    """Puts canaries into sums and scores them from what comes out. What both kinds share:
    whitening, parts, and the sum of log-likelihood ratios.
    """

    def __init__(self, plan: PrivacyPlan, layout: Layout, count: int) -> None:
        self._plan, self._layout = plan, layout
        self._whitener = Whitener(plan)
        parts = plan.sampler.parts
        own = (
            np.zeros(count, dtype=np.int64) if parts is None else parts[plan.dataset_size - count :]
        )
        self._members = [np.flatnonzero(own == part) for part in range(plan.event.bands)]
        self._scores = np.zeros(count)

    def see(self, step: int, residual: Tensor) -> None:
        """[size] what was released at a step, without the other records' part."""
        complete = self._whitener.push(step, residual)
        for row, white in complete + (
            self._whitener.flush() if step + 1 == self._plan.steps else []
        ):
            members = self._members[row % len(self._members)]
            if len(members):
                now = self._plan.at(row)
                rate = min(1.0, len(self._members) * now.sample_rate)
                unit = (now.noise_multiplier * now.max_grad_norm) ** 2
                products, energies = self._compare(white, members, now.max_grad_norm, rate)
                self._scores[members] += log_likelihood_ratio(
                    products / unit, energies * self._whitener.variance(row) / unit, rate
                )

    def _compare(
        self, white: Tensor, members: Indices, limit: float, rate: float
    ) -> tuple[Floats, Floats]:
        """<white, c> and |c|^2 of the canaries' contributions c, clipped to ``limit``, each drawn
        at ``rate``.
        """
        raise NotImplementedError

    def of_releases(self) -> Floats:
        """[m], higher for canaries that seem to be in."""
        return self._scores

    def add(
        self, run: PrivateRun, known: ClippedSum, drawn: Drawn, included: NDArray[np.bool_]
    ) -> ClippedSum:
        """The sum of the whole batch.

        Args:
            run: with its batch open.
            known: the other records' sum.
            drawn: canaries in the batch.
            included: [m] which are in; those drawn that are not count as drawn and give nothing.
        """
        raise NotImplementedError

    def begin(self) -> None:
        """Remembers what the weights' scores compare with; called before the first release."""
        raise NotImplementedError

    def of_weights(self) -> Floats:
        """[m] scores from the weights that training ended with."""
        raise NotImplementedError

    def _absent(self, run: PrivateRun, known: ClippedSum, count: int) -> ClippedSum:
        """Zeros of the canaries that were drawn and are not in."""
        if not count:
            return known
        return known + absence(run, known.gradients, count)


class GradientScores(Scores):
    """For canaries whose gradient is given."""

    def __init__(
        self, plan: PrivacyPlan, layout: Layout, model: nn.Module, directions: Directions
    ) -> None:
        super().__init__(plan, layout, len(directions.positions))
        self._model, self._directions = model, directions
        self._start: Tensor | None = None

    def add(
        self, run: PrivateRun, known: ClippedSum, drawn: Drawn, included: NDArray[np.bool_]
    ) -> ClippedSum:
        length = TOO_LONG * run.max_grad_norm
        like = self._layout.flatten(known.gradients)
        taken = drawn.numbers[included[drawn.numbers]]
        if len(taken):
            known = known + contribution(
                run, self._layout.restore(self._directions.rows(taken, length, like))
            )
        return self._absent(run, known, len(drawn.numbers) - len(taken))

    def _compare(
        self, white: Tensor, members: Indices, limit: float, rate: float
    ) -> tuple[Floats, Floats]:
        return self._directions.products(white, members) * limit, np.full(len(members), limit**2)

    def begin(self) -> None:
        self._start = self._layout.flatten(trainable_parameters(self._model)).clone()

    def of_weights(self) -> Floats:
        assert self._start is not None
        moved = self._layout.flatten(trainable_parameters(self._model)) - self._start
        return -self._directions.products(moved, np.arange(len(self._scores)))


class InputScores(Scores):
    """For canaries that are records, or users whose records are all alike. Their gradients change
    with the model; inner products with all of them are one derivative of a derivative, not one
    gradient each.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        layout: Layout,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        batch: Batch,
    ) -> None:
        super().__init__(plan, layout, batch_size_of(batch))
        self._model, self._loss, self._batch = model, per_example_loss, batch
        self._start: Floats | None = None
        # How often a record stands in what is clipped: of a sum, once for each of the user's.
        users, count = plan.sampler.users, batch_size_of(batch)
        summed = users is not None and plan.clipper.combined == "sum"
        self._times = users.sizes[-count:] if users is not None and summed else np.ones(count)

    def add(
        self, run: PrivateRun, known: ClippedSum, drawn: Drawn, included: NDArray[np.bool_]
    ) -> ClippedSum:
        taken = drawn.where(included[drawn.numbers])
        for part in taken.parts(EXAMPLES):
            records = self._some(part.rows)
            batch = records if part.sizes is None else UserBatch(records, part.sizes)
            known = known + run.clip(self._model, self._loss, batch)
        return self._absent(run, known, len(drawn.numbers) - len(taken.numbers))

    def _compare(
        self, white: Tensor, members: Indices, limit: float, rate: float
    ) -> tuple[Floats, Floats]:
        parts = [members[start : start + EXAMPLES] for start in range(0, len(members), EXAMPLES)]
        norms = [
            per_example_norms(self._model, self._loss, self._some(part)).detach() for part in parts
        ]
        factors = [
            torch.minimum(limit / n.clamp(min=1e-30), torch.from_numpy(self._times[part]).to(n))
            for n, part in zip(norms, parts, strict=True)
        ]
        # What the others are expected to give is taken away: half of them are in, and each is drawn
        # at the sampling rate.
        expected = sum(
            self._weighted_gradient(part, f) for part, f in zip(parts, factors, strict=True)
        )
        tangent = white - expected * (0.5 * rate)
        slopes = [self._slopes(part, tangent) * f for part, f in zip(parts, factors, strict=True)]
        energies = [(n * f).square() for n, f in zip(norms, factors, strict=True)]
        return torch.cat(slopes).double().cpu().numpy(), torch.cat(energies).double().cpu().numpy()

    def _weighted_gradient(self, part: Indices, weights: Tensor) -> Tensor:
        parameters = trainable_parameters(self._model)
        with torch.enable_grad():
            total = (self._loss(self._model, self._some(part)) * weights).sum()
            found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        filled = {
            name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(parameters.items(), found, strict=True)
        }
        return self._layout.flatten(filled)

    def _slopes(self, part: Indices, tangent: Tensor) -> Tensor:
        """[part] inner products of the tangent with every loss's gradient: the derivative by w of
        <tangent, gradient of sum w_i loss_i>.
        """
        parameters = trainable_parameters(self._model)
        along = self._layout.restore(tangent)
        with torch.enable_grad():
            losses = self._loss(self._model, self._some(part))
            weights = torch.ones_like(losses, requires_grad=True)
            found = torch.autograd.grad(
                (losses * weights).sum(),
                list(parameters.values()),
                create_graph=True,
                allow_unused=True,
            )
            pairs = [
                (g, along[name].to(g))
                for name, g in zip(parameters, found, strict=True)
                if g is not None
            ]
            total = torch.stack([(g * t).sum() for g, t in pairs]).sum()
        return torch.autograd.grad(total, weights)[0]

    def begin(self) -> None:
        self._start = self._losses_now()

    def of_weights(self) -> Floats:
        assert self._start is not None
        return self._start - self._losses_now()

    def _losses_now(self) -> Floats:
        count = len(self._scores)
        parts = [
            np.arange(start, min(start + EXAMPLES, count)) for start in range(0, count, EXAMPLES)
        ]
        with torch.no_grad():
            found = [self._loss(self._model, self._some(part)).double().cpu() for part in parts]
        return torch.cat(found).numpy()

    def _some(self, part: Indices) -> Batch:
        index = torch.from_numpy(part)
        return map_tensors(self._batch, lambda t: t[index.to(t.device)])
