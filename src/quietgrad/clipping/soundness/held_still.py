"""Randomness that is the same for every example, so that an example's loss alone and in company can
be compared with dropout switched on.

Random numbers usually depend on where an example stands in its batch. Inside ``CommonRandomness``
every random operation of PyTorch instead gives a pattern over its last dimension, the same for all
examples and positions, and the same in every pass. What draws by other means (numpy, Python, a
fused kernel) escapes; ``mixing`` finds that out by running a pass twice.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SEED = 0x5EED
MOST_SALT = 15  # that a pass is seeded with
OURS = frozenset(range(_SEED, _SEED + MOST_SALT + 1))
_FACTORIES = {"rand", "randn", "randint"}
_LIKES = {"rand_like", "randn_like", "randint_like"}

Level = Literal["usual", "low", "high"]
EXTREMES: tuple[Level, ...] = ("low", "high")
# Draws of which the least and the greatest are taken; and at most so many numbers at once.
_MANY = 100
_AT_MOST = 2**22


class CommonRandomness(TorchDispatchMode):
    """Every random operation inside gives the same numbers for all examples, and in every pass.

    One pattern would leave a branch closed that opens on three tosses in ten, so there are three:
    numbers as they come, all low and all high (the least and the greatest of a hundred draws,
    whatever the distribution).

    Attributes:
        level: which of them.
        used: whether there was a random operation.
        seeds: of the generators that were asked, the default one among them.
        shapes: of what was drawn, in order.
        known: of those, what was drawn by a seed that is not the library's: of a generator that was
            passed, or of the default one once it was seeded inside.
        moves: whether a generator that is passed goes on, as it would without this.
    """

    def __init__(self, level: Level = "usual") -> None:
        super().__init__()
        self.level = level
        self.used = False
        self.seeds: set[int] = set()
        self.shapes: list[tuple[int, ...]] = []
        self.known: list[tuple[int, ...]] = []
        self.moves = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "plain":
            return func(*args, **kwargs)
        if kind == "attention":  # a fused kernel: without its dropout
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("dropout_p"):
                self._note(args, kwargs)
            return func(**(given | {"dropout_p": 0.0}))
        self._note(args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        kwargs = {key: None if key == "generator" else value for key, value in kwargs.items()}
        if name == "native_dropout" and args[2] is not False:
            kept = self._mask(args[0], 1 - args[1])
            return args[0] * kept / (1 - args[1]), kept
        if name == "multinomial":
            return args[0].topk(args[1], dim=-1).indices
        if name == "bernoulli_":
            return args[0].copy_(
                self._mask(args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5))
            )
        if name == "bernoulli":
            return self._mask(args[0], args[1] if len(args) > 1 else kwargs.get("p", args[0])).to(
                args[0].dtype
            )
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            return args[0].copy_(
                self._pattern(
                    args[0], lambda like: func(torch.empty_like(like), *args[1:], **kwargs)
                )
            )
        if name in _LIKES:
            return self._pattern(
                func(*args, **kwargs), lambda like: func(like, *args[1:], **kwargs)
            )
        if name == "randperm":
            return func(*args, **kwargs).sort().values.roll(1)
        out = func(*args, **kwargs)  # within the caller's seeds
        if name in _FACTORIES:
            place = next(i for i, value in enumerate(args) if isinstance(value, list | tuple))
            return self._pattern(
                out,
                lambda like: func(*args[:place], list(like.shape), *args[place + 1 :], **kwargs),
            )
        if name == "normal" and isinstance(out, Tensor):
            return self._normal(args, out)
        return out

    def draws(self, func: Any) -> bool:
        """Whether an operation is a random one."""
        return _kind(func) == "random"

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.used = True
        given = kwargs.get("generator")
        if self.moves and given is not None:
            torch.rand((), generator=given, device=given.device)
        seed = _generator_asked(args, kwargs).initial_seed()
        self.seeds.add(seed)
        self.shapes.append(_shape_drawn(args))
        if seed not in OURS:
            self.known.append(self.shapes[-1])

    def _normal(self, args: tuple[Any, ...], like: Tensor) -> Tensor:
        """``torch.normal(mean, deviation)``, either of which may be a tensor."""
        mean, deviation = (
            args[0],
            args[1] if len(args) > 1 and not isinstance(args[1], list | tuple) else 1.0,
        )
        return self._pattern(like, lambda one: torch.empty_like(one).normal_()) * deviation + mean

    def _mask(self, like: Tensor, probability: Any) -> Tensor:
        """Truth with this probability, a number or a tensor.

        Low and high take turns where an example has more than one, so that no mask hides what
        another random number does.
        """
        wide = like if like.is_floating_point() else like.float()
        uniform = self._pattern(wide, lambda one: torch.empty_like(one).uniform_(), by_turns=True)
        mask = uniform < probability
        if (
            self.level == "usual"
            and isinstance(probability, float)
            and probability > 0
            and not bool(mask.any())
        ):
            return torch.ones_like(mask)  # everything dropped would hide what is to be seen
        return mask

    def _pattern(
        self, like: Tensor, draw: Callable[[Tensor], Tensor], by_turns: bool = False
    ) -> Tensor:
        """``draw`` for one position, the same for all others: over the last dimension that is more
        than one wide, the first one aside.
        """
        wide = [d for d in range(1, like.dim()) if like.shape[d] > 1]
        width = like.shape[wide[-1]] if wide else 3
        with _seeded_torch(like.device):
            drawn = self._drawn(like, width, draw, by_turns and bool(wide))
        if not wide:
            # One number for a whole example: it must not switch the example off, so the middle of
            # three.
            return drawn.sort().values[-2].expand(like.shape).clone()
        shape = [1] * like.dim()
        shape[wide[-1]] = width
        return drawn.view(shape).expand(like.shape).clone()

    def _drawn(
        self, like: Tensor, width: int, draw: Callable[[Tensor], Tensor], by_turns: bool
    ) -> Tensor:
        """[width]: one draw each, or the least or greatest of many."""
        if self.level == "usual":
            return draw(like.new_empty(width))
        many = min(_MANY, max(_AT_MOST // width, 8))
        drawn = draw(like.new_empty(many * width)).view(many, width)
        least, greatest = drawn.amin(dim=0), drawn.amax(dim=0)
        one, other = (least, greatest) if self.level == "low" else (greatest, least)
        if not by_turns:
            return one
        return torch.where(torch.arange(width, device=drawn.device) % 2 == 0, one, other)


class NotedDraws(TorchDispatchMode):
    """Random operations are as they are.

    Attributes:
        shapes: of what was drawn, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _kind(func) == "random":
            self.shapes.append(_shape_drawn(args))
        return func(*args, **(kwargs or {}))


def _generator_asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """The one that was passed, or the default one of the device that is drawn on."""
    given = kwargs.get("generator")
    if given is not None:
        return given
    like = next((value for value in args if isinstance(value, Tensor)), None)
    device = torch.device(kwargs.get("device") or ("cpu" if like is None else like.device))
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _shape_drawn(args: tuple[Any, ...]) -> tuple[int, ...]:
    """The first size that is given, or tensor that is written into or like which is drawn."""
    for value in args:
        if isinstance(value, Tensor):
            return tuple(value.shape)
        if isinstance(value, list | tuple):
            return tuple(value)
    return tuple(value for value in args if isinstance(value, int))  # randperm(n)


@functools.cache
def _kind(func: Any) -> str:
    """Of an operation: "plain", "attention" or "random"; a fact about PyTorch,
    so it may be kept.
    """
    if any(argument.name == "dropout_p" for argument in func._schema.arguments):
        return "attention"
    return "random" if torch.Tag.nondeterministic_seeded in func.tags else "plain"


@contextlib.contextmanager
def _seeded_torch(device: torch.device) -> Iterator[None]:
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        _seed_torch(_SEED, devices)
        yield


def _seed_torch(seed: int, devices: list[int]) -> None:
    torch.default_generator.manual_seed(
        seed
    )  # torch.manual_seed also notes where it was called from, which takes longer than a small pass
    for index in devices:
        torch.cuda.default_generators[index].manual_seed(seed)


@contextlib.contextmanager
def noting_seeds() -> Iterator[set[str]]:
    """What Python's and numpy's own generators are seeded with inside, other than by ``seeded``;
    torch's say it themselves.
    """
    noted: set[str] = set()
    ours = [(seed,) for seed in OURS]
    with contextlib.ExitStack() as stack:
        numpy = sys.modules.get("numpy")
        for module in (random, *([] if numpy is None else [numpy.random])):
            right = module.seed

            def note(*args: Any, _right: Any = right, **kwargs: Any) -> Any:
                if args[:1] not in ours:
                    noted.add(repr((args, kwargs)))
                return _right(*args, **kwargs)

            module.seed = note
            stack.callback(setattr, module, "seed", right)
        yield noted


def others_stand() -> tuple[Any, ...]:
    """Where Python's and numpy's own generators stand."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, words, *rest = numpy.random.get_state()
    return random.getstate(), words.tobytes(), *rest


@contextlib.contextmanager
def seeded(devices: list[int], salt: int = 0) -> Iterator[None]:
    """The generators of torch, Python and (where it is loaded) numpy begin at a fixed state inside,
    and are put back.
    """
    numpy = sys.modules.get("numpy")
    pythons, numpys = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            _seed_torch(_SEED + salt, devices)
            random.seed(_SEED + salt)
            if numpy is not None:
                numpy.random.seed(_SEED + salt)
            yield
        finally:
            random.setstate(pythons)
            if numpy is not None:
                numpy.random.set_state(numpys)
