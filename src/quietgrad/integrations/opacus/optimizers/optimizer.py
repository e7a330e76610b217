"""The optimiser as the loop sees it: ``step`` clips every record's gradient, adds the noise,
writes down the release and steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.clipped_sum import ClippedSum, PrivateCounts
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.soundness.processes import refuse_process_group
from quietgrad.integrations.opacus.following.constants import Constants
from quietgrad.integrations.opacus.following.faithful import faithful_program
from quietgrad.integrations.opacus.following.replay import Program
from quietgrad.integrations.opacus.grad_sample import GradSampleModule
from quietgrad.integrations.opacus.optimizers.not_offered import missing
from quietgrad.integrations.opacus.optimizers.steady import (
    FixedDivisor,
    SettingsOfABatch,
    other_gradient,
    steps_follow_the_data,
)
from quietgrad.integrations.opacus.settings import Releases
from quietgrad.integrations.opacus.source import BatchSource
from quietgrad.noise.noisy_sum import as_released
from quietgrad.plan.process import BoundToProcess
from quietgrad.randomness import RandomKey
from quietgrad.tensors import accumulation_dtype, trainable_parameters

AT_HAND = 8  # loops whose verdicts of the guard are kept


class _Mechanism(BoundToProcess):
    """Streams of one optimiser, the open batch's sums and the guard's verdicts. Secret."""

    def __init__(self, releases: Releases, source: BatchSource) -> None:
        super().__init__()
        self.releases = releases
        self.source = source
        self.key = RandomKey.from_entropy()
        self.released = 0
        self.sums: list[ClippedSum] = []  # of the open batch, one for each step of a loop's body
        self.bound: dict[Any, BoundClipper] = {}
        self.constants = Constants()
        self.settings = SettingsOfABatch()

    def bound_for(self, module: GradSampleModule, program: Program, plan: Any) -> BoundClipper:
        """Of a loop's body: guarded once, not at every step."""
        key = (plan.clipper.max_grad_norm, program.signature)
        bound = self.bound.pop(key, None)

        def per_example_loss(model: Any, records: Any) -> Tensor:
            return program.losses_of(model, records)

        if bound is None:
            bound = plan.clipper.bind(module._module, per_example_loss)
        bound.per_example_loss = per_example_loss
        self.bound[key] = bound
        while len(self.bound) > AT_HAND:
            self.bound.pop(next(iter(self.bound)))
        return bound


class DPOptimizer(FixedDivisor, Optimizer):
    """An optimiser whose steps are releases; learning rates, states and parameter groups are the
    wrapped optimiser's.

    Attributes:
        original_optimizer: the one that steps.
        noise_multiplier: sigma of the next release; may be changed between steps, by a rule that
            does not look at the data: every release is accounted for with its own.
        max_grad_norm: C of the next release; the same.
        loss_reduction: "mean" or "sum": whether gradients are divided by B.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> DPOptimizer:
        """Raises:
        ValueError: for an optimiser put together by hand, which would not know its batches.
        """
        if "expected_batch_size" in kwargs:
            raise ValueError(
                "DPOptimizer(expected_batch_size=) is not offered: an optimiser made by hand does "
                "not know of which batches its steps are; let PrivacyEngine.make_private build "
                "model, optimiser and loader together"
            )
        return super().__new__(cls)

    def __init__(
        self,
        optimizer: Optimizer,
        module: GradSampleModule,
        source: BatchSource,
        releases: Releases,
        noise_multiplier: float,
        max_grad_norm: float,
        loss_reduction: str,
    ) -> None:
        # Optimizer.__init__ is not called: groups and state are the wrapped optimiser's own.
        self.original_optimizer = optimizer
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.loss_reduction = loss_reduction
        self.step_hook: Callable[[DPOptimizer], None] | None = None
        self.secure_mode = releases.source == "secure"
        self.stepped = False
        self._is_last_step_skipped = False  # scripts ask for it after a part of a batch
        self._steps_here = 0
        self._usual: int | None = None  # steps on a batch, once values were read off one
        self._wrapped = module
        self._mechanism = _Mechanism(releases, source)
        self._written: dict[str, Tensor] = {}
        self.noise_of(0)  # judges the settings before any record is read

    def noise_of(self, release: int) -> Any:
        """The plan of the next release."""
        return self._mechanism.releases.plan(self.noise_multiplier, self.max_grad_norm, False)

    def begin_micro_batch(self, is_first: bool) -> None:
        """The loader opened a micro-batch."""
        self.stepped, self._steps_here = False, 0
        self._wrapped.pending.clear()
        self._mechanism.settings.require(self.noise_multiplier, self.max_grad_norm, is_first)
        if is_first:
            self._mechanism.sums.clear()

    def settle(self, empty: bool, has_read: bool) -> None:
        """The loop is done with a micro-batch. An empty one that it skipped gets its noise.

        Raises:
            RuntimeError: where the number of steps may have followed values of the batch.
        """
        while empty and self._steps_here < (self._usual or 1):
            self.step()
        if not empty and has_read:
            self._usual = self._steps_here if self._usual is None else self._usual
            if self._steps_here != self._usual:
                raise steps_follow_the_data()

    def remember(self, read: set[float]) -> None:
        """Numbers that the loop read off a batch that is over. Private."""
        self._mechanism.constants.remember(read)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients, and losses that were not stepped on; clipped sums of earlier
        micro-batches of the batch stay.
        """
        self._wrapped.zero_grad()
        for group in self.original_optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        self._written = {}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clips the losses since the last step, and where the batch is whole releases their noisy
        sum and steps. Two steps on one batch are two releases on it.

        Raises:
            RuntimeError: without ``backward``, outside the loader's loop, or where a gradient was
                left by something else than a release.
            ValueError: for losses that mix records, and what the clipper refuses.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self.original_optimizer.step()
        return loss

    @torch.no_grad()
    def pre_step(self, closure: Any = None) -> bool:
        """All of a step but the update; False where more of the batch is to come."""
        mechanism = self._mechanism
        mechanism._require_own_process()
        refuse_process_group()
        source = mechanism.source
        if source.tape is None or source.opened is None:
            raise RuntimeError(
                "optimizer.step() outside the loop over the private data loader: a release is of "
                "the batch that the loader gave last; loop over the loader that make_private "
                "returned, with the model in training mode when the loop begins"
            )
        self._require_no_other_gradients()
        with self._wrapped.bare(), self._wrapped.clipping():
            return self._pre_step(source)

    def _pre_step(self, source: BatchSource) -> bool:
        mechanism = self._mechanism
        slot = self._steps_here
        assert source.tape is not None
        if source.tape.records and source.tape.read_at is not None and slot == self._usual:
            raise steps_follow_the_data()
        settings = self.noise_multiplier, self.max_grad_norm
        mechanism.constants.require_settings(source.tape, *settings)
        clipped = self._clip(source.tape)
        if slot < len(mechanism.sums):
            mechanism.sums[slot] = mechanism.sums[slot] + clipped
        else:
            mechanism.sums.append(clipped)
        self._wrapped.pending.clear()
        self._steps_here += 1
        self.stepped = True
        self._is_last_step_skipped = not source.is_last
        if not source.is_last:
            return False
        self._release(mechanism.sums[slot])
        if self.step_hook is not None:
            self.step_hook(self)
        return True

    def _clip(self, tape: Any) -> ClippedSum:
        pending = self._wrapped.pending
        plan = self._mechanism.releases.plan
        if not tape.records:
            # Whatever the loop computed of no records (a mean of nothing is no number), its sum is
            # zero.
            zeros = {
                name: torch.zeros_like(p, dtype=accumulation_dtype(p.dtype), requires_grad=False)
                for name, p in trainable_parameters(self._wrapped._module).items()
            }
            claim = plan(self.noise_multiplier, self.max_grad_norm, False).clipper.claim
            return ClippedSum(zeros, claim, PrivateCounts())
        if not pending:
            raise RuntimeError(
                "optimizer.step() without loss.backward() on a loss of the private model's outputs "
                "for this batch; compute the loss from what the model returned for the records "
                "that the loader gave, in training mode"
            )
        program = faithful_program(tape, pending, self.loss_reduction, self._wrapped)
        self._mechanism.constants.require(program, self._steps_here)
        planned = plan(self.noise_multiplier, self.max_grad_norm, program.alone)
        bound = self._mechanism.bound_for(self._wrapped, program, planned)
        drawn = Projections(self._mechanism.key, self._mechanism.released)
        self._wrapped.forget_records()
        with torch.enable_grad():
            return bound.clip(program.records(), drawn, step=self._mechanism.released)

    def _release(self, clipped: ClippedSum) -> None:
        mechanism = self._mechanism
        opened = mechanism.source.opened
        assert opened is not None
        plan = mechanism.releases.plan(self.noise_multiplier, self.max_grad_norm, False)
        if clipped.claim != plan.clipper.claim:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm!r} was changed within a batch; change it "
                "between batches"
            )
        number, mechanism.released = mechanism.released, mechanism.released + 1
        opened.noise.append(plan.noise_multiplier)  # counted before it is drawn
        mechanism.source.accountant.noted(self._wrapped._module)
        noisy, _ = plan.noise.update(clipped, lambda _: mechanism.key, plan.noise.init(number))
        noisy = replace(noisy, expected_batch_size=self.expected_batch_size)
        scale = 1.0 if self.loss_reduction == "mean" else self.expected_batch_size
        parameters = dict(self._wrapped._module.named_parameters())
        for name, mean in noisy.mean().items():
            parameter = parameters[name]
            parameter.grad = as_released((mean * scale).to(parameter.dtype))
            self._written[name] = parameter.grad

    def _require_no_other_gradients(self) -> None:
        for name, p in self._wrapped._module.named_parameters():
            if p.grad is not None and p.grad is not self._written.get(name):
                raise other_gradient(name)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch's GradScaler asks for this in its step().
        raise RuntimeError(
            "GradScaler is not for private training: gradients are clipped to max_grad_norm, and "
            "do not vanish; leave it out (GradScaler(enabled=False) does nothing), call "
            "loss.backward() and optimizer.step(), and use autocast with bfloat16 alone"
        )

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Refused: the loader knows when a batch is whole.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "signal_skip_step is not the script's to call here: the loader knows when a batch is "
            "whole; use BatchMemoryManager"
        )

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """``fn(optimizer)`` after every release."""
        self.step_hook = fn

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """Parameters with a gradient to come."""
        groups = self.original_optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimiser's."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = param_groups

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The wrapped optimiser's."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: defaultdict[Any, Any]) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimiser's."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the wrapped optimiser."""
        self.original_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimiser's; nothing secret or private."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimiser."""
        self.original_optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        raise missing(name)

    def __repr__(self) -> str:
        return f"DPOptimizer({self.original_optimizer!r})"
