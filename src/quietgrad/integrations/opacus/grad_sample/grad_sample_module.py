"""The private model as the loop sees it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quietgrad.checks import SettingsWarning
from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import BY_AUTOGRAD
from quietgrad.integrations.opacus.following.nodes import CALL, LOOK, Ref, leaves, mapped
from quietgrad.integrations.opacus.following.tracing import CLOSED, Tape, Traced, plain_of
from quietgrad.integrations.opacus.grad_sample.no_grad_sample import put_on, take_off
from quietgrad.integrations.opacus.source import BatchSource
from quietgrad.plan.session.stepping import Stepping

REMEDY = (
    "it would publish them without clipping, noise and epsilon: use the model, the optimizer and "
    "the loader that make_private returned, all three (model, optimizer, data_loader = "
    "privacy_engine.make_private(...)), in place of those that it was given; train on public "
    "records before make_private, or after cleanup() of the model that it returned"
)


class _Link:
    """The batches that a wrapped model is trained on; a copy of the model has none."""

    def __init__(self, source: BatchSource | None) -> None:
        self.source = source
        # What optimizers may step on: also those of before make_private, by their old names.
        self.stepping = None if source is None else Stepping(REMEDY, always=True)
        self.pending: list[tuple[Tape, Ref, Tensor]] = []
        # The model's plain state before any record, until the guard has looked.
        self.before: Snapshot | None = None
        self.looked_at = False

    def __deepcopy__(self, memo: Any) -> _Link:
        return _Link(None)

    def __reduce__(self) -> Any:
        return _Link, (None,)


class GradSampleModule(nn.Module):
    """A model whose losses are privatised: called on records of the private loader in training
    mode it notes what it was called on, and ``optimizer.step()`` takes the losses of every record
    from that. In evaluation mode and under ``torch.no_grad()`` it is the model itself.

    Names of parameters begin with ``_module.``; all other attributes are the model's own.

    Args:
        m: the model.
        batch_first: whether records come first in its tensors.
        loss_reduction: "mean" or "sum", of the losses over records.
    """

    def __init__(
        self,
        m: nn.Module,
        source: BatchSource | None = None,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__()
        self._module = m
        self._link = _Link(source)
        put_on(m)
        self.meets()
        self._warned = False
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs. Their values are the model's; their gradient goes to what the
        inputs were made of, and never to the weights.
        """
        tape = self._tape()
        if tape is not None and not self._link.looked_at and self._link.before is None:
            # The loop runs the model before the clipper sees it: nothing may stay of that.
            self._link.before = Snapshot(self._module, None)
        if tape is None or tape.draws is None:
            return self._called(tape, args, kwargs)
        with tape.draws.not_counted():
            return self._called(tape, args, kwargs)

    def meets(self) -> None:
        """What is trained now is stepped on by releases alone."""
        if self._link.stepping is not None:
            self._link.stepping.met(p for p in self._module.parameters() if p.requires_grad)

    @contextlib.contextmanager
    def clipping(self) -> Iterator[None]:
        """Around backward passes that are the engine's own."""
        self.meets()  # what was frozen before, too
        keeps = self._link.stepping
        with contextlib.nullcontext() if keeps is None else keeps.clipping():
            yield

    @contextlib.contextmanager
    def bare(self) -> Iterator[None]:
        """Around what runs the model without the script."""
        yield

    def forget_records(self) -> None:
        """Before the guard looks for the first time: the model as it was before any record."""
        if self._link.before is not None:
            self._link.before.put_back()
        self._link.before, self._link.looked_at = None, True

    def _called(self, tape: Tape | None, args: Any, kwargs: Any) -> Any:
        plain_args, plain_kwargs = mapped((args, kwargs), Tensor, plain_of)
        inputs = leaves((plain_args, plain_kwargs), Tensor)
        outer = any(t.requires_grad for t in inputs)
        of_records = any(isinstance(t, Traced) for t in leaves((args, kwargs), Tensor))
        if tape is None or not (self.training and torch.is_grad_enabled()):
            if not of_records:
                return self._module(*plain_args, **plain_kwargs)
            return self._looked(tape, args, kwargs, outer)
        made_up = outer and not of_records
        rows = any(tape.rows_dim(t, only_its_own=made_up) is not None for t in inputs)
        if not rows and not (of_records and tape.has_bags):
            if outer:  # images of a generator, in a number of their own
                return self._frozen(plain_args, plain_kwargs)
            raise RuntimeError(
                "the private model was called in training mode on other records than the batch's: "
                "every input needs one row for each record that the loader gave; for public or "
                "made-up inputs use model.eval() or torch.no_grad()"
            )
        if made_up and not self._warned:
            self._warned = True
            warnings.warn(
                "another model gets a gradient through the private one, on as many rows as the "
                "batch has records; that number is private, and epsilon does not cover what the "
                "other model learns of it: give it a number of rows of your own",
                SettingsWarning,
                stacklevel=2,
            )
        if not tape.records:
            outputs = self._without_records(tape, plain_args, plain_kwargs)
        elif outer:
            outputs = self._frozen(plain_args, plain_kwargs)
        else:
            with torch.no_grad():
                outputs = self._module(*plain_args, **plain_kwargs)
        outputs = mapped(outputs, Tensor, _as_leaf)
        return tape.note(CALL, args, kwargs, outputs, module=self)

    def _looked(self, tape: Tape | None, args: Any, kwargs: Any, outer: bool) -> Any:
        """Outputs for records that no weight learns from; what is made of them is followed too."""
        plain_args, plain_kwargs = mapped((args, kwargs), Tensor, plain_of)
        if tape is not None and not tape.records:
            outputs = self._without_records(tape, plain_args, plain_kwargs)
        elif outer and torch.is_grad_enabled():
            outputs = self._frozen(plain_args, plain_kwargs)
        else:
            with torch.no_grad():
                outputs = self._module(*plain_args, **plain_kwargs)
        if tape is None:
            return mapped(outputs, Tensor, lambda t: Traced.of(t, CLOSED, Ref(0, 0)))
        return tape.note(LOOK, args, kwargs, outputs, module=self)

    def _tape(self) -> Tape | None:
        source = self._link.source
        return None if source is None else source.tape

    def _frozen(self, args: Any, kwargs: Any) -> Any:
        weights = {name: p.detach() for name, p in self._module.named_parameters()}
        return functional_call(self._module, weights, args, kwargs, tie_weights=False)

    def _without_records(self, tape: Tape, args: Any, kwargs: Any) -> Any:
        """Outputs for no records: those for a few of zeros, cut to none. Many layers cannot be
        called on nothing. What two and three records differ in is the records' dimension.
        """

        def of(count: int) -> Any:
            def one(t: Tensor) -> Tensor:
                dim = tape.rows_dim(t)
                if dim is None:
                    return t
                return t.new_zeros([*t.shape[:dim], count, *t.shape[dim + 1 :]])

            zeros_args, zeros_kwargs = mapped((args, kwargs), Tensor, one)
            return self._module(*zeros_args, **zeros_kwargs)

        with torch.no_grad():
            two, three = of(2), iter(leaves(of(3), Tensor))

        def none(t: Tensor) -> Tensor:
            sizes = zip(t.shape, next(three).shape, strict=True)
            dim = next((d for d, (a, b) in enumerate(sizes) if a != b), None)
            return t if dim is None else t.narrow(dim, 0, 0)

        return mapped(two, Tensor, none)

    def note_backward(self, tape: Tape, ref: Ref, loss: Tensor) -> None:
        """``backward`` was called on a loss of this model's outputs."""
        self._link.pending.append((tape, ref, loss))

    @property
    def pending(self) -> list[tuple[Tape, Ref, Tensor]]:
        """Losses since the last step or ``zero_grad``. Private."""
        return self._link.pending

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients, and losses that were not stepped on."""
        self._link.pending.clear()
        for p in self._module.parameters():
            p.grad = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            return getattr(self._module, name)

    def forbid_grad_accumulation(self) -> None:
        """Nothing: losses of a batch add up, batches never do."""

    def allow_grad_accumulation(self) -> None:
        """Nothing: losses of a batch add up, batches never do."""

    def add_hooks(self, **_: Any) -> None:
        """Nothing: there are no hooks on the model, and every training call is followed."""

    def enable_hooks(self) -> None:
        """Nothing, as ``add_hooks``."""

    def disable_hooks(self) -> None:
        """Nothing, as ``add_hooks``: training stays private."""

    def remove_hooks(self) -> None:
        """Nothing, as ``add_hooks``; ``cleanup`` ends private training."""

    def cleanup(self) -> None:
        """Ends private training of the model."""
        if self._link.stepping is not None:
            self._link.stepping.over()
        self._link = _Link(None)
        take_off(self._module)

    def to_standard_module(self) -> nn.Module:
        """The model itself; this wrapper trains it no more."""
        self.cleanup()
        return self._module


def _as_leaf(t: Tensor) -> Tensor:
    if t.requires_grad or not t.is_floating_point():
        return t
    return t.detach().requires_grad_()


__getattr__ = absent(
    __name__,
    dict.fromkeys(
        ("GradSampleHooks", "create_or_accumulate_grad_sample", "promote_current_grad_sample"),
        BY_AUTOGRAD,
    ),
)
