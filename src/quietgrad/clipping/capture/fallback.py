"""Per-example gradients of any module: its forward pass is repeated for each example, under vmap
where that works.

Serves bare ``nn.Parameter``s, custom normalisations, and attention and recurrent modules that are
not torch's own (``routines``). Cost: one more forward and backward pass of that module, another
backward pass for the spread (``signs``), and memory for its per-example gradients, [examples,
entries of its own parameters].
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from quietgrad.clipping.capture.capture import Use
from quietgrad.clipping.capture.escapes import (
    NotCaptured,
    does_not_run_again,
    draws_again,
    no_example_dimension,
)
from quietgrad.clipping.capture.units import first_dimension
from quietgrad.clipping.norms.factors import DirectGradients
from quietgrad.clipping.norms.signs import OF_SQUARES, Signs
from quietgrad.tensors import accumulation_dtype

# Gradients and spreads, by parameter.
Found = tuple[dict[str, Tensor], dict[str, Tensor]]

# What a child holds of the module's own parameters (a head's bias that its decoder adds) is the
# child's use, which its own site counts; replaced here too, it would count twice.
OWN = {"tie_weights": False}


def fallback_contributions(
    use: Use, batch_size: int, signs: Signs | None = None
) -> dict[str, DirectGradients]:
    """Per-example gradients of the module's own trainable parameters.

    Args:
        use: the call, with the gradients at its outputs.
        batch_size: number of examples.
        signs: of its outputs, for the gradients' spreads; None leaves those unknown.

    Returns:
        Local parameter name -> [batch_size, entries].

    Raises:
        ValueError: if the module draws random numbers (its forward pass could not be repeated), or
            examples are not its first dimension.
    """
    gradients, spreads = _found(use, batch_size, signs, formed=True)
    return {
        name: DirectGradients(g.reshape(batch_size, -1), spreads.get(name))
        for name, g in gradients.items()
    }


def fallback_spreads(use: Use, batch_size: int, signs: Signs) -> dict[str, Tensor]:
    """Local parameter name -> [batch_size] float64 spreads of the per-example gradients, which are
    not formed themselves. Arguments and errors: ``fallback_contributions``.
    """
    return _found(use, batch_size, signs, formed=False)[1]


def gradients_in_turn(use: Use, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """What ``fallback_contributions`` gives, one example after the other: parameters may be large.
    Errors are the same.
    """
    by_autograd = _passes(use, batch_size, None, formed=True)[1]
    return (by_autograd(i)[0] for i in range(batch_size))


def _found(use: Use, batch_size: int, signs: Signs | None, formed: bool) -> Found:
    """Per-example gradients, where they are wanted, and their spreads, where there are signs."""
    together, by_autograd = _passes(use, batch_size, signs, formed)
    found = together() if batch_size > 1 and use.site.unit.batches else None
    if found is None:  # one example after the other gives the same numbers
        each = [by_autograd(i) for i in range(batch_size)]
        gradients, spreads = (
            {name: torch.stack([one[part][name] for one in each]) for name in each[0][part]}
            for part in (0, 1)
        )
        found = gradients, spreads
    return found


def _passes(
    use: Use, batch_size: int, signs: Signs | None, formed: bool
) -> tuple[Callable[[], Found | None], Callable[[int], Found]]:
    """The module's passes over all examples under vmap (None where that does not work), and over
    one of them.
    """
    module, output_gradients = use.site.module, use.output_gradients
    refuse_randomness(use)
    if any(isinstance(x, PackedSequence) for x in use.args):
        raise no_example_dimension(use.site, "is called with a packed sequence")
    wanted = set(use.site.parameters)
    _refuse_two_names(use, wanted)
    own = {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False) if n in wanted}
    leaves, spec = pytree.tree_flatten((use.args, use.kwargs))
    leaves = [None if _is_key_value_cache(leaf) else leaf for leaf in leaves]
    in_dims = [_example_dim(use, i, leaf, batch_size) for i, leaf in enumerate(leaves)]
    positions = sorted(output_gradients)
    out_dims = [_output_example_dim(use, p, output_gradients[p], batch_size) for p in positions]

    cotangents = [output_gradients[p] for p in positions]
    signed = (
        None
        if signs is None
        else [
            signs.times(output_gradients[p], p, d) for p, d in zip(positions, out_dims, strict=True)
        ]
    )

    def outputs_of_one(parameters: dict[str, Tensor], example_leaves: list[Any]) -> list[Tensor]:
        full = [
            leaf if dim is None else leaf.unsqueeze(dim)
            for leaf, dim in zip(example_leaves, in_dims, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(full, spec)
        with (
            contextlib.nullcontext() if use.autocast is None else use.autocast.again(),
            _attributes_kept(module),
        ):
            flat = pytree.tree_leaves(functional_call(module, parameters, args, kwargs, **OWN))
        return [flat[p] for p in positions]

    def pulled_back(
        example_leaves: list[Any],
        example_cotangents: list[Tensor],
        example_signed: list[Tensor] | None,
    ) -> Found:
        pull_back = vjp(lambda parameters: outputs_of_one(parameters, example_leaves), own)[1]

        def pulled(at_outputs: list[Tensor]) -> dict[str, Tensor]:
            return pull_back([c.unsqueeze(d) for c, d in zip(at_outputs, out_dims, strict=True)])[0]

        spreads = {} if example_signed is None else _norms(pulled(example_signed))
        return pulled(example_cotangents) if formed else {}, spreads

    def require_sizes(outputs: list[Tensor], i: int) -> None:
        for out, c, d in zip(outputs, cotangents, out_dims, strict=True):
            if out.shape != c.select(d, i).unsqueeze(d).shape:
                raise ValueError("another size than for all examples")

    def by_autograd(i: int) -> Found:
        parameters = {name: p.clone().requires_grad_(True) for name, p in own.items()}
        example = [
            leaf if dim is None else leaf.select(dim, i)
            for leaf, dim in zip(leaves, in_dims, strict=True)
        ]
        try:
            with torch.enable_grad():
                outputs = outputs_of_one(parameters, example)
            require_sizes(outputs, i)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            if batch_size == 1 or "allocate" in str(error):  # torch's words for memory
                raise
            # Without torch's words, which tell how many records there are.
            raise does_not_run_again(use.site.name) from None

        def pulled(at_outputs: list[Tensor], again: bool) -> dict[str, Tensor]:
            seeds = [c.select(d, i).unsqueeze(d) for c, d in zip(at_outputs, out_dims, strict=True)]
            found = torch.autograd.grad(
                outputs, list(parameters.values()), seeds, allow_unused=True, retain_graph=again
            )
            return {
                name: torch.zeros_like(p) if g is None else g
                for (name, p), g in zip(parameters.items(), found, strict=True)
            }

        spreads = {} if signed is None else _norms(pulled(signed, formed))
        return pulled(cotangents, False) if formed else {}, spreads

    if batch_size > 1 and all(dim is None for dim in in_dims):
        raise NotCaptured(
            f"layer {use.site.name!r} ({type(module).__name__}) is called without an input that "
            "has an example dimension, so per-example "
            "gradients cannot be told apart; freeze its own parameters, pass it something with "
            "an example dimension, or take one example at a time (engine='one-example', exact for "
            "every layer)"
        )

    def together() -> Found | None:
        # Operations without a batching rule raise, or warn and run one example after the other
        # inside vmap: right either way.
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="There is a performance drop", category=UserWarning
            )
            try:
                dims = (in_dims, out_dims, None if signed is None else out_dims)
                found: Found = vmap(pulled_back, in_dims=dims, randomness="error")(
                    leaves, cotangents, signed
                )
                return found
            except (RuntimeError, NotImplementedError) as error:
                if "random" in str(error):
                    raise draws_again(use.site.name) from error
        return None

    return together, by_autograd


@contextlib.contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """What a pass leaves in plain attributes (a weight that a hook computes, the last input) is put
    back: under vmap it is a wrapper, which is dead after it, and nobody can look into it.
    """
    before = [(vars(m), dict(vars(m))) for m in module.modules()]
    try:
        yield
    finally:
        for now, then in before:
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)


def _norms(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Spreads of one example, from signed gradients; what is beyond the range of the type counts as
    infinite.
    """
    return {
        name: torch.linalg.vector_norm(g, dtype=accumulation_dtype(g.dtype)).double() * OF_SQUARES
        for name, g in gradients.items()
    }


def _refuse_two_names(use: Use, wanted: set[str]) -> None:
    seen: dict[int, str] = {}
    for name, parameter in use.site.module.named_parameters(remove_duplicate=False):
        if name in wanted and seen.setdefault(id(parameter), name) != name:
            raise NotCaptured(
                f"layer {use.site.name!r} ({type(use.site.module).__name__}) has one parameter "
                f"under two names, {seen[id(parameter)]!r} and {name!r}, which the generic "
                "fallback cannot tell apart; keep one of the names, or take one example at a time "
                "(engine='one-example')"
            )


def _is_key_value_cache(leaf: Any) -> bool:
    """A cache that the forward pass has filled: in a repeated pass it would add the same keys and
    values once more.
    """
    return any(
        kind.__name__ == "Cache" and kind.__module__ == "transformers.cache_utils"
        for kind in type(leaf).__mro__
    )


def _example_dim(use: Use, position: int, leaf: Any, batch_size: int) -> int | None:
    size, dim = first_dimension(leaf), use.site.unit.dim_at(position)
    if size < 0 or dim:
        return None if size < 0 else dim
    if position in use.shared or leaf is _mask_of_pairs(use):
        return None
    return 0 if size == batch_size else None


def _mask_of_pairs(use: Use) -> Tensor | None:
    """The [positions, positions] mask of an attention module, which all examples share."""
    if use.site.unit.pair_mask is None:
        return None
    name, place = use.site.unit.pair_mask
    mask = use.kwargs.get(name, use.args[place] if len(use.args) > place else None)
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _output_example_dim(use: Use, position: int, gradient: Tensor, batch_size: int) -> int:
    module = use.site.module
    if use.site.unit.needs_batch_first and not module.batch_first:
        raise ValueError(
            f"layer {use.site.name!r} ({type(module).__name__}) has batch_first=False; build it "
            "with batch_first=True, so that "
            "examples are its first dimension"
        )
    dim = use.site.unit.dim_at(position)
    if gradient.dim() <= dim or gradient.shape[dim] != batch_size:
        raise no_example_dimension(use.site, "returns a tensor")
    return dim


def refuse_randomness(use: Use) -> None:
    module = use.site.module
    if not module.training:
        return
    for name, child in module.named_modules():
        rate = (
            getattr(child, "p", 0.0)
            if isinstance(child, nn.modules.dropout._DropoutNd)
            else getattr(child, "dropout", 0.0)
        )
        if isinstance(rate, float) and rate > 0:
            raise NotCaptured(
                f"layer {use.site.name!r} ({type(module).__name__}) has parameters "
                f"{sorted(use.site.parameters)} that need the generic "
                f"fallback, which repeats its forward pass, but {name or 'it'!r} applies dropout "
                f"with probability {rate}; "
                "set that probability to 0, freeze these parameters, or move them into a small "
                "module of their own"
            )
