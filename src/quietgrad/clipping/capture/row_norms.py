"""Lengths of the rows that a linear layer multiplies, taken as they come: of its input right after
its product, while the processor's cache has it, and of the gradient at its output right after the
output's node used it. Nothing of a call is kept, so that no node of the graph is made for it.

What a spread needs of most matrices is no more (``engines.spreads``). Cost: one reading of each.
Code that writes into an input between the passes where torch does not count it (``.data``) gives
autograd other rows than those that were read.
Shape legend: b rows of the batch, t positions, p outputs, d inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from quietgrad.clipping.capture.layout import Layout, Site
from quietgrad.clipping.norms.factors.rows import is_same
from quietgrad.clipping.norms.rules.linear import linear_rule, transposed_linear_rule

WIDE = (torch.float32, torch.float64)

# Inputs whose norms are remembered: an adapter's two layers take turns with their neighbours'.
REMEMBERED = 2


class RowNorms(NamedTuple):
    """Of one call, [b, t] as they come. Private. ``longest``: entries of a row, at most."""

    of_inputs: Tensor
    of_gradients: Tensor
    longest: int


Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
Taker = Callable[[Site, RowNorms], None]


class _Before(NamedTuple):
    factor: Tensor
    version: int
    norms: Tensor


@dataclass
class RowWatch:
    """Takes the norms of a pass; queries, keys and values have one input, read once.

    Attributes:
        take: told each call's norms, during the backward pass.
    """

    take: Taker
    _before: list[_Before] = field(default_factory=list, repr=False)

    def norms_of(self, factor_btn: Tensor) -> Tensor:
        """[b, t]."""
        for place, known in enumerate(self._before):
            if is_same(known.factor, known.version, factor_btn):
                self._before.append(self._before.pop(place))
                return known.norms
        # Selective checkpointing counts operations, and what is known may not be known again when
        # the layers run again: no mode sees this one.
        unseen = _get_current_dispatch_mode() is not None
        with _disable_current_modes() if unseen else contextlib.nullcontext():
            found = torch.linalg.vector_norm(factor_btn, dim=2)
        self._before = [
            *self._before[1 - REMEMBERED :],
            _Before(factor_btn, factor_btn._version, found),
        ]
        return found

    def forget(self) -> None:
        """No activation outlives its pass."""
        self._before = []


class Pass(Protocol):
    """What of a recording is read, which ``capture`` describes."""

    paused: bool
    in_forward: bool


def watches_rows(site: Site, layout: Layout) -> bool:
    """Whether a module's calls may be watched so."""
    whole = layout.spread is None and layout.cut is None
    return whole and "weight" in site.parameters and site.rule in _AFFINE


_AFFINE = (linear_rule, transposed_linear_rule)


def row_hook(
    site: Site, watch: RowWatch, recording: Pass, batch_size: int, otherwise: Hook
) -> Hook:
    """A forward hook that runs before all others of its module.

    Args:
        site: ``watches_rows``.
        watch: told what is found.
        recording: of the pass.
        batch_size: rows of the batch.
        otherwise: the hook for calls that are not of one ordinary tensor.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        result = None
        if len(args) == 1 and not kwargs and not recording.paused and torch.is_grad_enabled():
            result = _result_of(args[0], output, batch_size)
        if result is None:
            return otherwise(module, args, kwargs, output)
        b, d, p = batch_size, args[0].shape[-1], output.shape[-1]
        of_inputs = watch.norms_of(args[0].detach().reshape(b, -1, d))
        place = result.output_nr

        def arrived(_: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[place]
            if gradient is not None and not recording.in_forward:
                of_gradients = torch.linalg.vector_norm(gradient.reshape(b, -1, p), dim=2)
                watch.take(site, RowNorms(of_inputs, of_gradients, max(p, d)))

        # After the node: of hooks that run before it, the user's may come later and change what
        # arrives.
        result.grad_fn.register_hook(arrived)
        return None

    return hook


def _result_of(x: Any, output: Any, batch_size: int) -> Any:
    """The tensor at whose node the gradient at the output arrives, after whatever hooks of the
    user's have changed it; None where input or output are not ordinary.

    With a bias, torch returns a view of its product's result. Code that writes into the view
    leads the graph past the view's node, but not past that of the result.
    """
    if type(x) is not Tensor or type(output) is not Tensor or x.dtype not in WIDE:
        return None
    if x.dtype != output.dtype or x.is_nested or output.is_nested:
        return None
    if not x.numel() or not output.numel():
        return None
    if x.dim() < 2 or x.shape[0] != batch_size or output.shape[:-1] != x.shape[:-1]:
        return None
    result = output._base if output._is_view() else output
    if result is None or result.grad_fn is None or not output.is_contiguous():
        return None
    whole = result.numel() == output.numel() and result.shape[-1] == output.shape[-1]
    return result if whole else None
