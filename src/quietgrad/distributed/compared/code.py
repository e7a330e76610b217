"""Digests of a model's structure and code, and of a loss: ranks that run others would make other
passes, and where these meet, gloo ends their processes without a word.

A function is its name and its code, with those of the functions that it closes over; not what else
it closes over, which may be a rank's own (its number, a log, a device). Not seen: functions that
are found by a global name, and what modules hold besides their layers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from typing import Any

from torch import Tensor, nn

from quietgrad.distributed.alike import digest
from quietgrad.tensors import is_spread

CODE = ("model", "loss function")
DEEPEST = 4  # functions inside functions


def code_of(model: nn.Module, per_example_loss: Any) -> dict[str, str]:
    """What has to be the same on all ranks, by its name in a refusal.

    Args:
        model: without wrappers.
        per_example_loss: the run's.
    """
    layers, parameters = _layers(model), _parameters(model)
    said = digest(layers, parameters), digest(_function(per_example_loss))
    return dict(zip(CODE, said, strict=True))


def _layers(model: nn.Module) -> list[tuple[object, ...]]:
    known: dict[type, object] = {}
    found: list[tuple[object, ...]] = []
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in known:
            known[kind] = _function(kind.forward)
        checkpoints = bool(getattr(module, "gradient_checkpointing", False))
        found.append((name, kind.__qualname__, known[kind], checkpoints, _gathers(module)))
    return found


def _gathers(module: Any) -> list[tuple[object, ...]]:
    """How fully_shard gathers the parameters of a layer."""
    with contextlib.suppress(Exception):
        groups = module._get_fsdp_state()._fsdp_param_groups
        return [(repr(g.mp_policy), g.post_forward_mesh_info is None) for g in groups]
    return []


def _parameters(model: nn.Module) -> list[tuple[object, ...]]:
    return [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad, _placed(p))
        for name, p in model.named_parameters()
    ]


def _placed(parameter: Tensor) -> str:
    spread: Any = parameter
    return str((spread.placements, spread.device_mesh.shape)) if is_spread(parameter) else ""


def _function(function: Any, depth: int = 0) -> object:
    if isinstance(function, functools.partial):
        return "partial", _function(function.func, depth), sorted(function.keywords)
    with contextlib.suppress(ValueError):  # it wraps itself
        function = inspect.unwrap(function)
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        inner = [] if depth == DEEPEST else _closed_over(function)
        told = [_function(one, depth + 1) for one in inner]
        return function.__qualname__, _code(function.__code__), told
    kind: Any = type(function)
    called = kind.forward if isinstance(function, nn.Module) else vars(kind).get("__call__")
    code = getattr(called, "__code__", None)
    return kind.__qualname__, None if code is None else _code(code)


def _closed_over(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            if isinstance(cell.cell_contents, types.FunctionType | types.MethodType):
                found.append(cell.cell_contents)
    return found


def _code(code: types.CodeType) -> tuple[object, ...]:
    consts = [_constant(value) for value in code.co_consts]
    return code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, consts


def _constant(value: object) -> object:
    if isinstance(value, types.CodeType):  # whose own text says where it lies
        return _code(value)
    # In an order of its own in every process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
