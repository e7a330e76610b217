"""What the many runs of an audit train: a model so small that thousands of runs take seconds, or
one of the user's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.capture.examples import UserBatch
from quietgrad.generators import States, keyed_generators
from quietgrad.plan import PrivacyPlan
from quietgrad.tensors import Batch, batch_size_of, map_tensors, tensors_of

INPUTS, OUTPUTS = 8, 4
LENGTH = 10.0  # of every gradient, in units of C


@dataclass(frozen=True)
class Stage:
    """A model, the records that the attacker knows, and the canary.

    Attributes:
        model, per_example_loss: as for ``PrivateRun.clip``.
        records: records 0 .. N - 2 of the plan's data set; of a plan for users a ``UserBatch`` of
            users 0 .. N - 2.
        canary: one example, record (user) N - 1. Read for input canaries; a gradient canary takes
            its place but not its gradient.
    """

    model: nn.Module
    per_example_loss: PerExampleLoss
    records: Batch
    canary: Batch

    @property
    def known(self) -> int:
        """N - 1, records beside the canary."""
        return _count(self.records)

    def require(self, plan: PrivacyPlan) -> None:
        """Refuses records that are not the plan's."""
        known, one = self.known, _count(self.canary)
        if known != plan.dataset_size - 1 or one != 1:
            raise ValueError(
                f"the stage has {known} records and {one} canaries; the plan is for "
                f"{plan.dataset_size} records, the last of which is the canary: give one fewer, "
                "and one canary"
            )

    def require_no_draws(self) -> None:
        """Refuses a loss that draws random numbers, for a canary that goes through the model beside
        the others: its coming moves their draws on, as likely as before but others than those that
        the attacker subtracts, who would take the difference for the canary's.

        Raises:
            ValueError: with the remedy.
        """
        some = self.canary
        with keyed_generators(0), torch.no_grad():
            before = States.now()
            records = some.records if isinstance(some, UserBatch) else some
            self.per_example_loss(self.model, records)
            moved = before.moved()
        if moved and self.known:
            raise ValueError(
                "the stage's model or loss draws random numbers (dropout), and with an input "
                "canary beside the other records an attacker would have to know these: a sound "
                "mechanism would be refuted. Give the stage a model in evaluation mode, or use "
                "kind='gradient'"
            )

    def choose(self, indices: Tensor, with_canary: bool) -> Batch:
        """The records (users) at ``indices``, and the canary after them."""
        if isinstance(self.records, UserBatch):
            return self._choose_users(indices.tolist(), with_canary)
        canaries = iter(list(tensors_of(self.canary)))

        def pick(records: Tensor) -> Tensor:
            canary = next(canaries)
            chosen = records[indices]
            return torch.cat([chosen, canary]) if with_canary else chosen

        return map_tensors(self.records, pick)

    def _choose_users(self, users: list[int], with_canary: bool) -> UserBatch:
        known, canary = self.records, self.canary
        ends = torch.tensor((0, *known.sizes), device="cpu").cumsum(0).tolist()
        rows = [row for user in users for row in range(ends[user], ends[user + 1])]
        sizes = tuple(known.sizes[user] for user in users)
        chosen = Stage(self.model, self.per_example_loss, known.records, canary.records)
        records = chosen.choose(torch.tensor(rows, dtype=torch.long, device="cpu"), with_canary)
        return UserBatch(records, sizes + canary.sizes if with_canary else sizes)


def _count(batch: Batch) -> int:
    """Records, or users."""
    return len(batch.sizes) if isinstance(batch, UserBatch) else batch_size_of(batch)


def linear_stage(plan: PrivacyPlan) -> Stage:
    """One linear layer and a loss that is linear in its output: every record's gradient is one
    outer product, the same at all weights, ten times as long as C.

    Gradients of rank one, and no parameter beside the layer's weight, are where the sketched norm
    of a gradient varies most.
    """
    if plan.clipper.combined is not None:
        raise ValueError(
            "the plan protects users, and the built-in stage has records; pass a Stage whose "
            "records and canary are quietgrad.clipping.UserBatch, the canary of one user"
        )
    if plan.clipper.views > 1:
        raise ValueError(
            f"the plan averages {plan.clipper.views} views of a record, and the built-in stage has "
            "one; pass a Stage whose tensors have the shape [records, views, ...]"
        )
    generator = torch.Generator().manual_seed(0)  # made-up public records
    model = nn.Linear(INPUTS, OUTPUTS, bias=False, device="cpu")
    scale = LENGTH * plan.max_grad_norm / (INPUTS * OUTPUTS) ** 0.5

    def made(count: int) -> tuple[Tensor, Tensor]:
        with torch.device("cpu"):  # where its generator is
            inputs = torch.randint(0, 2, (count, INPUTS), generator=generator) * 2.0 - 1.0
            targets = torch.randint(0, 2, (count, OUTPUTS), generator=generator) * 2.0 - 1.0
        return inputs, targets * scale

    return Stage(model, weighted_outputs, made(plan.dataset_size - 1), made(1))


def weighted_outputs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """[examples] sums of outputs times given weights."""
    inputs, weights = batch
    product: Tensor = model(inputs) * weights
    return product.sum(1)
