"""Small helpers on batches (nested containers of tensors whose first dimension is the example) and
on named parameters.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Batch = Any


def map_tensors(
    batch: Batch,
    function: Callable[[Tensor], Tensor],
    beside: Callable[[Any], Any] | None = None,
) -> Batch:
    """Applies ``function`` to every tensor of nested mappings, tuples, lists and dataclasses;
    ``beside`` to lists, tuples and arrays without tensors. Other leaves stay as they are.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if beside is not None and is_list(batch):
        return beside(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function, beside) for key, value in batch.items()}
        if type(batch) is dict:
            return mapped
        with contextlib.suppress(TypeError):
            return type(batch)(mapped)  # type: ignore[call-arg]  # a BatchEncoding stays one
        return mapped
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, beside) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, function, beside) for value in batch)
    return map_fields(batch, lambda value: map_tensors(value, function, beside))


def map_fields(value: Any, function: Callable[[Any], Any]) -> Any:
    """A dataclass with ``function`` of its fields; itself where none changes, or it is none."""
    fields = fields_of(value)
    mapped = {name: function(field) for name, field in fields.items()}
    if all(mapped[name] is field for name, field in fields.items()):
        return value
    made = copy.copy(value)  # not its __init__, which may take or do something else
    for name, field in mapped.items():
        object.__setattr__(made, name, field)  # frozen ones too
    return made


def fields_of(value: object) -> dict[str, Any]:
    """What a dataclass holds, by name, also what it keeps without a field of its own, such as a
    statistic that its ``__post_init__`` made; nothing of anything else.
    """
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return {}
    names = dict.fromkeys(field.name for field in dataclasses.fields(value))
    names |= dict.fromkeys(getattr(value, "__dict__", ()))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)
    elif not isinstance(batch, str | bytes | int | float):  # of words there may be many
        yield from tensors_of(list(fields_of(batch).values()))


def is_list(value: object) -> bool:
    """Whether it is a list, tuple or array of things, without tensors."""
    several = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    array = type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0
    return array or (several and not any(True for _ in tensors_of(value)))


def batch_size_of(batch: Batch) -> int:
    """Number of examples: the common first dimension of all tensors.

    Raises:
        ValueError: if there is no tensor, or the first dimensions differ.
    """
    sizes = {int(t.shape[0]) if t.dim() and not t.is_nested else -1 for t in tensors_of(batch)}
    if not sizes:
        raise ValueError(
            "batch holds no tensor; pass tensors, or dicts, tuples and dataclasses of tensors, "
            "whose first dimension is the example"
        )
    if len(sizes) > 1 or -1 in sizes:
        # Not the sizes themselves: how many records a batch holds is private.
        raise ValueError(
            "batch holds tensors with different first dimensions; every tensor's first dimension "
            "must be the example, of one length (fill nested ones up, and nest them in the loss; "
            "close constants over the loss function instead of passing them in the batch; "
            "flat ids and offsets of an EmbeddingBag: quietgrad.loading.Bags.from_offsets in "
            "collate_fn, and its flat() in the loss)"
        )
    return sizes.pop()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """All tensors of a batch on a device; from pinned memory without waiting. What comes to the
    processor is waited for: it would else be read before it is there.
    """
    return map_tensors(batch, lambda t: t.to(device, non_blocking=device.type != "cpu"))


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name to parameter, tied parameters once, frozen ones left out.

    Raises:
        ValueError: if there is none.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError(
            f"model {type(model).__name__} has no trainable parameters; set requires_grad=True on "
            "those to train (or attach LoRA adapters)"
        )
    return found


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class of a module. ``fully_shard`` gives a module a subclass of its own, with the same
    forward pass.
    """
    kind = type(module)
    wrapped = len(kind.__mro__) > 2 and kind.__mro__[1].__name__ == "FSDPModule"
    return kind.__mro__[2] if wrapped else kind


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks: a DTensor, whose class is not imported for this."""
    return type(tensor).__name__ == "DTensor"


def local_of(tensor: Tensor) -> Tensor:
    """What of a tensor this process holds: the same memory."""
    if not is_spread(tensor):
        return tensor
    spread: Any = tensor
    with torch.no_grad():
        held: Tensor = spread.to_local()
    return held


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor. Where it is spread over ranks, all of them come here in the same order."""
    if not is_spread(tensor):
        return tensor
    spread: Any = tensor
    with torch.no_grad():
        found: Tensor = spread.full_tensor()
    return found


def received(tensor: Tensor) -> Tensor:
    """A plain tensor of what may still be on its way from other ranks."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    arriving: Any = tensor
    with torch.no_grad():
        found: Tensor = arriving.trigger_wait()
    return found


def spread_like(shard: Tensor, parameter: Tensor) -> Tensor:
    """This process's shard as a tensor that is spread as a parameter is."""
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    with torch.no_grad():
        return DTensor.from_local(
            shard.contiguous(),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


class Block(NamedTuple):
    """What a process holds of a tensor that is spread over ranks.

    Attributes:
        start: of its entries, in each dimension.
        shape: how many there are.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]


def block_at(
    shape: torch.Size,
    placements: tuple[Any, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Block:
    """The block of one place of a mesh. The last dimension of the mesh cuts first, as torch.chunk
    cuts: ``fully_shard`` shards what tensor parallel plans have cut.

    Args:
        shape: of the whole tensor.
        placements: one for each dimension of the mesh.
        mesh: its sizes.
        coordinate: the place.
    """
    start, held = [0] * len(shape), list(shape)
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim % len(shape)
        each = -(-held[dim] // mesh[axis])
        skipped = min(coordinate[axis] * each, held[dim])
        start[dim] += skipped
        held[dim] = min(each, held[dim] - skipped)
    return Block(tuple(start), tuple(held))


def block_of(tensor: Tensor) -> Block:
    """The block of a DTensor that this process holds.

    Raises:
        ValueError: where torch places it elsewhere, or what is here has another shape.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    like: Any = tensor
    mesh, placements = like.device_mesh, tuple(like.placements)
    known = {"Shard", "_StridedShard", "Replicate"}
    if all(type(placement).__name__ in known for placement in placements):
        found = block_at(like.shape, placements, tuple(mesh.shape), tuple(mesh.get_coordinate()))
        shape, start = compute_local_shape_and_global_offset(like.shape, mesh, placements)
        same = tuple(shape) == found.shape and (start == found.start or 0 in found.shape)
        if same and tuple(local_of(tensor).shape) == found.shape:
            return found
    raise ValueError(
        f"a tensor of shape {tuple(tensor.shape)} is spread over ranks as {placements}, which is "
        "not how fully_shard and tensor parallel plans cut it into blocks; give it a first "
        "dimension that every rank of the mesh has a part of, or freeze it (requires_grad_(False))"
    )


def axis_of(tensor: Tensor, ranks: tuple[int, ...]) -> int | None:
    """Along which dimension of its mesh a DTensor is spread over just these ranks, in their order;
    None where along none.
    """
    from torch.distributed import get_process_group_ranks

    like: Any = tensor
    mesh = like.device_mesh
    for axis in range(mesh.ndim):
        if tuple(get_process_group_ranks(mesh.get_group(axis))) == ranks:
            return axis
    return None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms and sums are accumulated in float32 at least."""
    return dtype if dtype == torch.float64 else torch.float32


class Autocast(NamedTuple):
    """Whether and how products were narrowed somewhere, to compute there again."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """Of the calling code."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, it is as it was; casts are not remembered."""
        return torch.autocast(
            self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


def full_precision() -> contextlib.AbstractContextManager[None]:
    """Products of float32 tensors inside the block are float32 products: no autocast, no TF32 on a
    GPU, no bfloat16 on a processor, whatever the user set for the model's own.
    """
    narrowed = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    found = [(*place, getattr(*place[:2])) for place in _precision_settings()]
    # "none" is what the settings above it say, which torch has looked up: nothing is narrowed.
    others = [place for place in found if place[3] not in (place[2], "none")]
    if not narrowed and not others:  # nearly always, and once for every layer of every step
        return contextlib.nullcontext()
    return _made_full(narrowed, others)


@contextlib.contextmanager
def _made_full(narrowed: list[str], others: list[Any]) -> Iterator[None]:
    """Inside, these devices do not cast, and these settings of torch's are exact."""
    with contextlib.ExitStack() as stack:
        for device in narrowed:
            stack.enter_context(torch.autocast(device, enabled=False))
        for holder, name, exact, before in others:
            setattr(holder, name, exact)
            stack.callback(setattr, holder, name, before)
        yield


def narrowed_products(devices: Collection[str]) -> float:
    """The largest unit roundoff to which float32 products on these devices are rounded by torch's
    settings; 0 where they are exact.
    """
    whole = getattr(torch.backends, "fp32_precision", "ieee")
    found = {
        whole if (value := getattr(holder, name)) == "none" else value
        for holder, name, _ in _precision_settings()
        if ("cpu" if getattr(holder, "backend", "") == "mkldnn" else "cuda") in devices
    }
    known = {"bf16": 2.0**-8, "tf32": 2.0**-11, True: 2.0**-11}
    return max((known.get(one, 0.0) for one in found), default=0.0)


@functools.cache
def _precision_settings() -> tuple[tuple[Any, str, object], ...]:
    """Where torch keeps the precision of float32 products, and what is exact there. torch 2.9 and
    later have a setting for each library and kind of product.
    """
    backends: Any = torch.backends
    if hasattr(backends.mkldnn, "matmul"):
        holders = [backends.mkldnn.matmul, backends.mkldnn.conv]
        if backends.cuda.is_built():
            holders += [backends.cuda.matmul, backends.cudnn.conv]
        return tuple((holder, "fp32_precision", "ieee") for holder in holders)
    return (backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)
