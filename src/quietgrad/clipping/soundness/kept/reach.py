"""What a model and a loss can reach in plain Python: every place where something may be kept from
one call to the next, nearest first.

Walked: closures, default arguments, attributes of functions, objects and classes, ``functools``
partials and caches, bound objects, hooks, containers, and of the globals those that the code names.
The library's own machinery is not: functions of known libraries are asked for their closures and
default arguments alone, as their globals are the same for everybody's models and lead everywhere;
and objects of the kinds in ``_APART`` are left out whole, since a loss has no business writing into
them and they hold whole programs (trainers, data sets, loaders, optimisers, loggers, threads).
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.clipping.norms.rules.checked import added_rules
from quietgrad.clipping.soundness.kept.holders import (
    ABSENT,
    MUTABLE,
    Named,
    content_of,
    slot_of,
)

# Objects that are looked at, at most, and of one container so many; nearest first. A model of a
# thousand layers has about 20 000.
MOST_OBJECTS = 200_000
MOST_ITEMS = 1_000

# Packages whose globals and classes are not walked.
_LIBRARIES = frozenset(
    {*sys.stdlib_module_names, "quietgrad", "torch", "torchvision", "torchaudio", "numpy", "scipy"}
    | {"transformers", "peft", "trl", "accelerate", "datasets", "tokenizers", "safetensors"}
    | {"lightning", "pytorch_lightning", "lightning_utilities", "torchmetrics", "opacus", "pandas"}
    | {"pyarrow", "PIL", "matplotlib", "tqdm", "rich", "wandb", "tensorboard", "mlflow", "optuna"}
    | {"pytest", "_pytest", "pluggy", "hypothesis", "triton", "sklearn", "huggingface_hub"}
) - {"__main__"}
# Modules whose objects are left out: everything of torch that is not a module, a tensor or a
# generator of random numbers; what runs the program round a loss.
_APART = (
    "torch.", "lightning.", "pytorch_lightning.", "accelerate.", "datasets.", "logging.", "queue.",
    "threading.", "multiprocessing.", "concurrent.", "asyncio.", "io.", "socket.", "sqlite3.",
    "pandas.", "pyarrow.", "wandb.", "tensorboard.", "mlflow.", "matplotlib.", "pytest.",
    "_pytest.", "unittest.", "transformers.trainer", "transformers.training_args",
    "transformers.integrations.", "transformers.tokenization_", "tokenizers.", "trl.trainer.",
    "quietgrad.plan.", "quietgrad.clipping.", "quietgrad.loading.", "quietgrad.training.sources.",
    "quietgrad.integrations.opacus.",
)  # fmt: skip
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
_CODE = (types.ModuleType, types.CodeType, types.FrameType, types.TracebackType)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...))


@dataclass(frozen=True)
class Found:
    """An object, and a name of where it was found that tells nothing of any record."""

    place: str
    thing: Any


def reachable(model: nn.Module, loss: Any, seen: dict[Any, Any] | None = None) -> Iterator[Found]:
    """Everything that the two can reach, and rules that a user added for layers of the model, once
    each. Their order is the same for the same state.

    Of the model's own parameters and buffers the attributes alone: ``unchanged`` watches the rest.

    Args:
        model, loss: where to begin.
        seen: filled with all that is come across, by identity.
    """
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    waiting = deque([Found("per_example_loss", loss), Found("model", model)])
    waiting.extend(Found("a layer rule", rule) for rule in added_rules(model))
    waiting.extend(
        Found("a hook of all modules", value)
        for name, value in vars(torch.nn.modules.module).items()
        if name.startswith("_global_") and isinstance(value, dict)
    )
    yield from walked(waiting, {} if seen is None else seen, own)


def walked(
    waiting: deque[Found], seen: dict[Any, Any], own: Collection[int] = ()
) -> Iterator[Found]:
    """Everything that these reach, nearest first, and that was not seen; which holds on to it, so
    that no identity comes twice. ``own``: what is walked, and not given.
    """
    for _ in range(MOST_OBJECTS):
        if not waiting:
            return
        found = waiting.popleft()
        thing = found.thing
        if isinstance(thing, Named):
            key = id(thing.namespace), thing.names
            if key in seen:
                continue
            seen[key] = thing
            yield found
        elif type(thing) in _PLAIN:
            yield found
            continue
        elif id(thing) in seen:
            continue
        elif id(thing) in own:
            seen[id(thing)] = thing
        else:
            seen[id(thing)] = thing
            yield found
        waiting.extend(_inside(found))


def _inside(found: Found) -> Iterator[Found]:
    thing, place, kind = found.thing, found.place, type(found.thing)
    if kind is Attributes:
        return
    if isinstance(thing, Named):
        for name in sorted(thing.names):
            value = thing.namespace.get(name, ABSENT)
            if isinstance(value, types.ModuleType):  # of a package
                yield from _of_module(value, thing.names)
            elif value is not ABSENT:
                yield Found(f"{place}.{name}", value)
        return
    if issubclass(kind, (*MUTABLE, tuple, frozenset)):
        yield from _contents(found)
    if issubclass(kind, types.FunctionType):
        yield from _of_function(thing)
    elif kind is types.CellType:
        yield Found(place, content_of(thing))
    elif kind is types.MethodType:
        yield Found(place, thing.__func__)
        yield Found(place, thing.__self__)
    elif kind is weakref.ref:
        yield Found(place, thing())
    elif kind is types.BuiltinMethodType:
        yield Found(place, thing.__self__)
    elif issubclass(kind, functools.partial):
        yield from (Found(place, part) for part in (thing.func, thing.args, thing.keywords))
    elif kind in (staticmethod, classmethod):
        yield Found(place, thing.__func__)
    elif kind is property:
        yield from (Found(place, part) for part in (thing.fget, thing.fset))
    elif kind is functools.cached_property:
        yield Found(place, thing.func)
    elif kind is functools._lru_cache_wrapper:
        yield Found(place, thing.__wrapped__)
    elif issubclass(kind, type):
        if not is_of_a_library(thing):
            yield from _of_class(thing)
    elif issubclass(kind, Tensor):
        yield from _attributes(found)
        if kind in (Tensor, nn.Parameter) and thing.is_leaf:
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                yield Found(f"{place}.{name}", getattr(thing, name, None))
    elif issubclass(kind, nn.Module) or not _is_apart(kind):
        yield from _of_object(found)


def _contents(found: Found) -> Iterator[Found]:
    thing, place = found.thing, found.place
    if isinstance(thing, bytearray):
        return
    # Of a dictionary in order; a set's order may change from one process to another, which matters
    # to nobody here.
    items = list(dict.values(thing)) if isinstance(thing, dict) else list(thing)
    if isinstance(thing, dict) and len(thing) <= MOST_ITEMS:
        yield from (Found(place, key) for key in dict.keys(thing) if type(key) not in _PLAIN)
    yield from (Found(place, item) for item in items[:MOST_ITEMS])


def _of_function(function: types.FunctionType) -> Iterator[Found]:
    code, name = function.__code__, function.__qualname__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    yield from (Found(f"{variable} (in {name})", cell) for variable, cell in cells)
    for defaults in (function.__defaults__, function.__kwdefaults__):
        if defaults:
            yield Found(f"a default argument of {name}", defaults)
    yield from _attributes(Found(f"function {name}", function))
    module = str(function.__globals__.get("__name__", ""))
    if module.split(".")[0] not in _LIBRARIES:
        names, read = names_in(code), argued_in(code, _OF_GLOBALS)
        yield Found(f"global {module}", Named(function.__globals__, read))
        imported = [sys.modules.get(name) for name in argued_in(code, ("IMPORT_NAME",))]
        for value in (*map(function.__globals__.get, read), *imported):
            if isinstance(value, types.ModuleType):
                yield from _of_module(value, names)


def _of_module(module: types.ModuleType, names: frozenset[str]) -> Iterator[Found]:
    if not _is_library(module):
        yield Found(f"global {module.__name__}", Named(vars(module), names))


def names_in(code: types.CodeType) -> frozenset[str]:
    """Globals and attributes that a function's code names, functions inside it included."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def argued_in(code: types.CodeType, operations: tuple[str, ...]) -> frozenset[str]:
    """Those alone that these operations name."""
    inner = (argued_in(c, operations) for c in code.co_consts if isinstance(c, types.CodeType))
    own = (i.argval for i in dis.get_instructions(code) if i.opname in operations)
    return frozenset(own).union(*inner)


def _of_class(kind: type) -> Iterator[Found]:
    for name, value in vars(kind).items():
        if name not in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"):
            yield Found(f"class attribute {kind.__qualname__}.{name}", value)


def _of_object(found: Found) -> Iterator[Found]:
    kind = type(found.thing)
    own = [c for c in kind.__mro__ if not is_of_a_library(c)]
    yield from (Found(f"class {c.__qualname__}", c) for c in own)
    if issubclass(kind, nn.Module) or not any(_is_apart(c) for c in kind.__mro__):
        yield from _attributes(found)
    else:  # a trainer's, a data set's: those of its attributes that the user's own code names
        code = (f.__code__ for c in own for f in vars(c).values() if type(f) is types.FunctionType)
        names = frozenset().union(*(names_in(c) for c in code))
        inside = dictionary_of(found.thing)
        if inside is not None and names:
            yield Found(found.place, Named(inside, names))


def _attributes(found: Found) -> Iterator[Found]:
    inside = dictionary_of(found.thing)
    if inside is not None:
        yield Found(found.place, Attributes(inside, found.thing))
        for name, value in list(inside.items()):
            if name == "_modules" and isinstance(value, dict):
                yield Found(found.place, value)
                yield from (Found(f"{found.place}.{n}", m) for n, m in value.items())
            elif name not in ("__orig_class__", "_trainer", "_fabric"):
                yield Found(f"{found.place}.{name}", value)
    for name, member in slots_of(type(found.thing)).items():
        yield Found(f"{found.place}.{name}", slot_of(found.thing, member))


class Attributes:
    """The dictionary of an object's attributes, whose values are found apart, by their names."""

    def __init__(self, inside: dict[str, Any], owner: Any) -> None:
        self.inside, self.owner = inside, owner


def slots_of(kind: type) -> dict[str, Any]:
    """Name -> descriptor of the attributes that a class keeps without a dictionary."""
    return {
        name: member
        for c in kind.__mro__
        if not is_of_a_library(c)
        for name, member in vars(c).items()
        if type(member) is types.MemberDescriptorType
    }


def dictionary_of(thing: Any) -> dict[str, Any] | None:
    """Of an object's attributes."""
    try:
        if isinstance(thing, threading.local):  # one for each thread; records meet this one's
            return thing.__dict__
        inside = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return inside if type(inside) is dict else None


def is_of_a_library(kind: type) -> bool:
    """Whether a class belongs to a library whose classes and globals are not walked."""
    return str(kind.__module__).split(".")[0] in _LIBRARIES


def _is_library(module: types.ModuleType) -> bool:
    return str(vars(module).get("__name__", "")).split(".")[0] in _LIBRARIES


def _is_apart(kind: type) -> bool:
    """Whether objects of this class are left out."""
    if issubclass(kind, (nn.Module, Tensor)):
        return False
    return f"{kind.__module__}.".startswith(_APART) or issubclass(kind, _CODE)


def is_generator(thing: Any) -> bool:
    """Of random numbers: torch's, Python's, numpy's."""
    if isinstance(thing, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        thing, numpy.random.Generator | numpy.random.RandomState
    )
