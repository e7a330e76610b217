"""The ordinary source of noise: numpy's and torch's generators on keyed Philox streams. Fast;
statistically sound; not cryptographic, and floating-point numbers like any other.

A parameter's entries are cut, in the order of its memory, into blocks with a stream each. So any
stretch of a parameter's noise is drawn without the rest of it (a rank draws its shard alone), at
the cost of a block at either end. On a processor blocks are drawn by as many threads as torch has.
Here is the one place that knows of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quietgrad.noise.sources.stretch import Stretch
from quietgrad.randomness import RandomKey

# Entries with one stream. On a processor a block takes half a millisecond, making its generator a
# thirtieth of that. Elsewhere a block is one kernel, and its key has 64 bits, so that there should
# not be too many of them.
BLOCK = 2**16
DEVICE_BLOCK = 2**24


@dataclass(frozen=True)
class KeyedSource:
    """Normal numbers in the dtype of the gradients (docs/privacy/assumptions.md, for what these
    cannot do).
    """

    name = "keyed"
    grid = 0.0

    def normal(
        self, like: Tensor, key: RandomKey, step: int, name: str, scale: float = 1.0
    ) -> Tensor:
        return self.stretch(like, key, step, name, Stretch(0, like.numel()), scale)

    def stretch(
        self,
        like: Tensor,
        key: RandomKey,
        step: int,
        name: str,
        place: Stretch,
        scale: float = 1.0,
    ) -> Tensor:
        drawn = stretch(like, key, step, name, place)
        return drawn if scale == 1.0 else drawn.mul_(scale)

    def how_drawn(self, like: Mapping[str, Tensor]) -> str:
        return how_drawn(like)


def how_drawn(like: Mapping[str, Tensor]) -> str:
    """What ``normal`` depends on beside key, step and name.

    Args:
        like: tensors in the dtype and on the device of the gradients.
    """
    ways = set()
    for tensor in like.values():
        kind = tensor.device.type
        if kind == "cpu":
            source = f"numpy {np.__version__}"
        else:  # a GPU's numbers depend on how many processors share the work
            model = torch.cuda.get_device_name(tensor.device) if kind == "cuda" else kind
            source = f"torch {torch.__version__} on {model}"
        # What has one block alone is drawn as before there were blocks.
        size = block_of(kind)
        blocks = f", blocks of {size}" if tensor.numel() > size else ""
        ways.add(f"{str(tensor.dtype).removeprefix('torch.')} by {source}{blocks}")
    return ", ".join(sorted(ways))


def normal(like: Tensor, key: RandomKey, step: int, name: str) -> Tensor:
    """Standard normal noise in the shape, dtype and device of ``like``: a function of (key, step,
    name) and the kind of device alone.
    """
    return stretch(like, key, step, name, Stretch(0, like.numel()))


def stretch(like: Tensor, key: RandomKey, step: int, name: str, place: Stretch) -> Tensor:
    """The noise of a stretch of a parameter, in the shape of ``like``: what ``normal`` of the whole
    parameter has there.

    Args:
        like: the stretch, as it lies in the parameter's memory.
        key, step, name: which noise.
        place: where it begins, and how many entries the parameter has.
    """
    start, count, size = place.start, like.numel(), block_of(like.device.type)
    if not count:
        return torch.zeros_like(like)
    on_processor = like.device.type == "cpu"
    first, last = start // size, (start + count - 1) // size
    of_one_block = not start % size and count == min(size, place.whole - start)
    if of_one_block and not on_processor:
        return _drawn(tuple(like.shape), like, key, step, name, first)
    made = torch.empty(count, dtype=like.dtype, device=like.device)
    inferring = torch.is_inference_mode_enabled()  # which other threads do not know

    def draw(block: int) -> None:
        with torch.inference_mode(inferring):
            write(block)

    def write(block: int) -> None:
        begin, end = max(start, block * size), min(start + count, (block + 1) * size)
        part, before = made[begin - start : end - start], begin - block * size
        if on_processor:
            _write(part, before, key, step, _stream(name, like.dtype, block))
            return
        # A GPU's numbers depend on how many are drawn; a processor's do not.
        drawn_to = min(place.whole, (block + 1) * size)
        drawn = _drawn((drawn_to - block * size,), like, key, step, name, block)
        part.copy_(drawn[before : end - block * size])

    blocks = range(first, last + 1)
    threads = min(torch.get_num_threads(), len(blocks)) if on_processor else 1
    if threads == 1:
        for block in blocks:
            draw(block)
    else:  # made for each draw: threads that wait would not be there after a fork
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw, blocks))  # which raises what a thread raised
    return made.view(like.shape)


def block_of(device: str) -> int:
    """How many entries have one stream on a kind of device."""
    return BLOCK if device == "cpu" else DEVICE_BLOCK


def _stream(name: str, dtype: torch.dtype, block: int) -> str:
    """The name of a block's stream."""
    if dtype == torch.float64:
        # a stream of its own: the same words in another precision are another, related, noise
        name = f"{name}\0float64"
    return f"{name}\0block {block}" if block else name  # no parameter's name holds a zero byte


def _write(part: Tensor, before: int, key: RandomKey, step: int, stream: str) -> None:
    """A stream's numbers on a processor, but for so many before; numpy draws without holding up
    other threads.
    """
    generator = key.generator("noise", step, stream)
    kind = np.float64 if part.dtype == torch.float64 else np.float32
    if not before and part.dtype in (torch.float32, torch.float64):
        generator.standard_normal(dtype=kind, out=part.numpy())
        return
    drawn = generator.standard_normal(before + len(part), dtype=kind)
    part.copy_(torch.from_numpy(drawn[before:]))


def _drawn(
    shape: tuple[int, ...], like: Tensor, key: RandomKey, step: int, name: str, block: int
) -> Tensor:
    """The first entries of a block on a GPU."""
    generator = torch.Generator(device=like.device)
    generator.manual_seed(
        key.words("noise", step, _stream(name, like.dtype, block))[0]
    )  # CUDA's generator is a Philox counter with a 64-bit key
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)
