"""Each kind of place that can hold something between two calls is seen where it changed, and put
back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quietgrad.clipping.soundness.kept.snapshot import Snapshot

# What a loss closes over, a change of it, and what is there.
Case = tuple[Any, Callable[[], Any], Callable[[], Any]]
CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


@case
def keyword_default_that_is_replaced() -> Case:
    def known(*, thrown: bool = False) -> bool:
        return thrown

    return known, lambda: setattr(known, "__kwdefaults__", {"thrown": True}), known


@case
def variable_that_is_bound_later() -> Case:
    def bind() -> None:
        nonlocal thrown
        thrown = True

    def is_bound() -> bool:
        try:
            return bool(thrown)
        except NameError:
            return False

    if CASES is None:
        thrown = True
    return is_bound, bind, is_bound


@case
def numbers_below_torch_s_counter() -> Case:
    table = torch.zeros(3)
    return table, lambda: table.data.fill_(1.0), table.tolist


@case
def tensor_of_another_shape() -> Case:
    table = torch.zeros(3)
    return table, lambda: setattr(table, "data", torch.zeros(5)), table.tolist


@case
def tensor_of_another_type() -> Case:
    table = torch.zeros(3)
    return table, lambda: setattr(table, "data", table.double()), lambda: table.dtype


@case
def list_behind_a_setter() -> Case:
    seen: list[Any] = []

    class Setting:
        mode = property(lambda self: 0, lambda self, value: seen.append(value))

    setting = Setting()
    return setting, lambda: setattr(setting, "mode", 1), lambda: list(seen)


@case
def list_of_a_static_method() -> Case:
    seen: list[Any] = []

    class Helper:
        @staticmethod
        def keep() -> None:
            seen.append(1)

    return Helper(), Helper.keep, lambda: list(seen)


@case
def object_in_a_frozen_set() -> Case:
    class Kept:
        thrown = False

    one = Kept()
    return frozenset({one}), lambda: setattr(one, "thrown", True), lambda: one.thrown


@pytest.mark.parametrize("name", CASES)
def test_it_is_seen_and_put_back(name: str) -> None:
    kept, change, look = CASES[name]()
    snapshot = Snapshot(nn.Identity(), lambda model, batch: kept)
    before = look()
    assert not snapshot.changed()
    change()
    assert look() != before
    assert snapshot.changed()
    assert snapshot.put_back() == []
    assert look() == before
    assert not snapshot.changed()
