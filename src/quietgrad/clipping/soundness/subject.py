"""What the guard examines, a model and its loss, and how it looks: passes with the same random
numbers every time, with or without what per-example gradients are made of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.backward import (
    Checkpointing,
    PerExampleLoss,
    forward_captured,
    gradients_of_batch,
    of_a_pass_that_trains,
    require_per_example,
    uncompiled,
    visit_captured_calls,
    with_any_checkpointing,
)
from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.capture.layout import Layout, in_graph
from quietgrad.clipping.capture.layout.modules import modules_of
from quietgrad.clipping.capture.spread import each_gradient
from quietgrad.clipping.norms.coarseness import Watch, is_coarse
from quietgrad.clipping.soundness.company.repeated import repeated_gradients
from quietgrad.clipping.soundness.company.rule_gradients import (
    Key,
    RuleGradients,
    own_rules,
    rule_gradients,
)
from quietgrad.clipping.soundness.fingerprints import HALVES, Factors, factors_of, print_of
from quietgrad.clipping.soundness.held_still import others_stand, seeded
from quietgrad.tensors import Batch, batch_size_of


@dataclass(frozen=True)
class Tolerance:
    """What rounding may do to one example's numbers when others share its matrix products.

    Sums in another order change a float32 activation by about 1e-7 of its size; depth, softmax and
    cancellation before the loss leave 1e-5 to 1e-4 in the models of the tests (TF32 and autocast:
    1e-3 to 5e-2). The limits are an order above, and below the few per cent that would matter.

    Attributes:
        loss, floor: relative and absolute, between losses.
        factor: relative, between captured factors.
        again: relative, for the same pass run twice.
        vanishing: between gradients at a layer's output, relative to the largest one of any layer.
    """

    loss: float
    floor: float
    factor: float
    again: float
    vanishing: float


_TOLERANCES = {
    "double": Tolerance(1e-6, 1e-9, 1e-5, 1e-9, 1e-12),
    "single": Tolerance(5e-3, 1e-4, 2e-2, 1e-4, 1e-6),
    "half": Tolerance(5e-2, 2e-2, 0.25, 1e-2, 1e-3),
}


# Times which a loud example's loss counts in the backward pass: a target a million times too large
# has such a squared error. A scale for all gradients of a batch, or a bound of their norm, changes
# with it, and none of the layers' outputs does.
LOUD_LOSS = 2.0**40

# Of a verdict: names of what is trained, and every module's mode.
SubjectKey = tuple[frozenset[str], tuple[bool, ...]]


def key_of(model: nn.Module, trained: Iterable[str]) -> SubjectKey:
    """Of a model as it is now."""
    return frozenset(trained), tuple([module.training for module in modules_of(model)])


@dataclass
class Subject:
    """What is examined: the user's model and loss, and what is known of them.

    Attributes:
        half: whether half precision was seen inside (autocast); found out by passes.
        seeds: of torch's default generators, as passes left them.
        others_stand: where the last pass left Python's and numpy's.
        coarsest: unit roundoffs of the coarsest results in forward passes, one a pass.
        coarsest_back: the largest in backward passes.
    """

    model: nn.Module
    layout: Layout
    per_example_loss: PerExampleLoss
    checkpointing: Checkpointing
    half: bool = False
    seeds: set[int] = field(default_factory=set)
    others_stand: tuple[Any, ...] = ()
    coarsest: set[float] = field(default_factory=set)
    coarsest_back: float = 0.0

    @cached_property
    def key(self) -> SubjectKey:
        """As it was when it was first asked for: what switches modes in a pass is refused."""
        return key_of(self.model, self.layout.parameters)

    @property
    def trained_loss(self) -> PerExampleLoss:
        """The loss where gradients are looked at: there has to be one."""
        return of_a_pass_that_trains(self.per_example_loss)

    @property
    def devices(self) -> list[int]:
        return sorted(
            {
                p.device.index or 0
                for p in self.layout.parameters.values()
                if p.device.type == "cuda"
            }
        )

    def losses(self, batch: Batch, salt: int = 0) -> Tensor:
        """[examples] losses without a graph; the same random numbers every time."""
        running = self.layout.running()
        with running, seeded(self.devices, salt), torch.enable_grad(), uncompiled(self.model):
            with Watch() as watch:
                losses = self.per_example_loss(self.model, batch)
            self._note_precision(watch)
            self._note_seeds()
            self.others_stand = others_stand()
        require_per_example(losses, batch_size_of(batch))
        return losses.detach()

    def _note_precision(self, forward: Watch) -> None:
        self.coarsest.add(forward.roundoff)
        self.half = self.half or is_coarse(forward.roundoff)

    def _note_seeds(self) -> None:
        self.seeds.add(torch.default_generator.initial_seed())
        self.seeds |= {torch.cuda.default_generators[i].initial_seed() for i in self.devices}

    def look(
        self,
        batch: Batch,
        wanted: Sequence[int] | None = None,
        salt: int = 0,
        times: Tensor | None = None,
        first: int | None = None,
    ) -> Look:
        """One forward and one backward pass under capture.

        Args:
            batch: a few examples.
            wanted: of the sum of these examples' losses only.
            salt: of the random numbers.
            times: [examples] what each layer's output is multiplied by; None for one. Where it is
                not one, the loss counts ``LOUD_LOSS`` times.
            first: of many examples, so many are compared, the first ones, by factors; None for all.
        """

        def run(reentrant: bool) -> Look:
            found: dict[tuple[str, int], Factors] = {}
            reached: set[tuple[str, int]] = set()
            own: dict[Key, RuleGradients] = {}
            calls: dict[str, int] = {}
            recordings: list[Recording] = []
            n = batch_size_of(batch)

            def receive(use: Use) -> None:
                number = calls[use.site.name] = calls.get(use.site.name, -1) + 1
                reached.add((use.site.name, number))
                factors = factors_of(use, n, first)
                if factors is not None:
                    found[use.site.name, number] = factors
                given = dict(rule_gradients(use))
                if times is None and first is None:
                    given |= repeated_gradients(use, n, recordings[0])
                for name, gradients in given.items():
                    own[use.site.name, number, name] = gradients

            passes = forward_captured(
                self.model, self.layout, self.trained_loss, batch, receive, reentrant
            )
            louder = contextlib.nullcontext() if times is None else louder_layers(self, times)
            watch = Watch()
            with seeded(self.devices, salt), louder, watch, passes as (losses, recording):
                recordings.append(recording)
                self._note_precision(watch)
                heard = losses if times is None else losses * _weights_of(losses, times)
                chosen = heard if wanted is None else heard[list(wanted)]
                visit_captured_calls(chosen, recording, self.layout)
                self.others_stand = others_stand()
            self.coarsest_back = max(self.coarsest_back, watch.roundoff)
            return Look(losses.detach(), found, own, frozenset(reached))

        look = with_any_checkpointing(self.checkpointing, run)
        self.half = self.half or any(factors.half for factors in look.factors.values())
        return look

    def plain_prints(self, one: Batch) -> Tensor:
        """[parameters, 2] norm, and sum with known numbers, of one example's gradient by plain
        autograd; and of what rules of the user's give, which may keep something too.
        """
        plain = self._autograd_prints(one)
        if not own_rules(self.layout):
            return plain
        given = [gradients.print_of(0) for gradients in self.look(one).own.values()]
        return torch.cat([plain, *given])

    def loss_and_prints(self, one: Batch) -> tuple[Tensor, Tensor]:
        """[examples] losses, and ``plain_prints``, of the same pass: what a gradient follows from
        may be what the pass before it left, which must not be one of the same record.
        """
        loss = self.per_example_loss
        found: list[Tensor] = []

        def noted(model: nn.Module, records: Batch) -> Tensor:
            with Watch() as watch:
                found.append(loss(model, records))
            self._note_precision(watch)
            return found[-1]

        self.per_example_loss = noted
        try:
            prints = self.plain_prints(one)
        finally:
            self.per_example_loss = loss
        return found[0].detach(), prints

    def _autograd_prints(self, one: Batch) -> Tensor:
        if self.layout.spread is not None:
            return self._prints_one_by_one(one)

        def run(reentrant: bool) -> Tensor:
            with seeded(self.devices), uncompiled(self.model):
                gradients = gradients_of_batch(
                    self.model, self.layout, self.trained_loss, one, reentrant
                )
                self._note_seeds()
            here = self.layout.here
            return torch.stack([_print(here(name, g)) for name, g in gradients.items()])

        return with_any_checkpointing(self.checkpointing, run)

    def _prints_one_by_one(self, one: Batch) -> Tensor:
        """The same where no process holds a whole gradient."""
        prints = dict.fromkeys(self.layout.parameters, _print(None))

        def take(name: str, gradient: Tensor) -> None:
            prints[name] = _print(self.layout.here(name, gradient))

        with self.layout.running(), seeded(self.devices), torch.enable_grad():
            with uncompiled(self.model):
                losses = self.trained_loss(self.model, one)
                self._note_seeds()
            each_gradient(losses.sum(), in_graph(self.layout), take)
        return torch.stack(list(prints.values()))

    def tolerance(self, losses: Tensor) -> Tolerance:
        """By the coarsest arithmetic that took part."""
        dtypes = {p.dtype for p in self.model.parameters()} | {losses.dtype}
        if self.half or dtypes & set(HALVES) or torch.is_autocast_enabled():
            return _TOLERANCES["half"]
        return _TOLERANCES["double" if dtypes == {torch.float64} else "single"]


@contextlib.contextmanager
def louder_layers(subject: Subject, times_b: Tensor) -> Iterator[None]:
    """Inside, outputs of trainable layers that have a rule, whose first dimension is the example,
    are multiplied by a number for each example.
    """

    def multiply(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        if not output.dim() or len(output) != len(times_b):
            return None
        times = times_b.to(output.dtype).view(-1, *[1] * (output.dim() - 1))
        return torch.where(times == 1, output, output * times)

    sites = [site for site in subject.layout.sites if site.rule is not None]
    handles = [site.module.register_forward_hook(multiply) for site in sites]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _weights_of(losses: Tensor, times_b: Tensor) -> Tensor:
    """[examples] one, and for loud examples ``LOUD_LOSS``, or what half precision has room for."""
    loud = min(LOUD_LOSS, torch.finfo(losses.dtype).max ** 0.5)
    return torch.where(times_b == 1, 1.0, loud).to(losses.dtype)


def _print(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(2, dtype=torch.double, device="cpu")
    return print_of(gradient.detach().flatten()).cpu().double()


@dataclass(frozen=True)
class Look:
    """What one pass showed.

    Attributes:
        losses: [examples].
        factors: (layer, number of its call) -> what its per-example gradients are made of.
        own: (layer, number of its call, parameter) -> what a rule of the user's gives.
        reached: (layer, number of its call) that got a gradient, comparable or not.
    """

    losses: Tensor
    factors: dict[tuple[str, int], Factors]
    own: dict[Key, RuleGradients]
    reached: frozenset[tuple[str, int]] = frozenset()
