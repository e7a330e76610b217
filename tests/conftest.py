"""Every run of the tests draws the same numbers: hypothesis its examples, unless a random campaign
is asked for (``make test-random``, CONTRIBUTING.md), the global generators theirs, and what asks
for entropy its own (entropy.py).
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# No test needs a model hub, and where there is no route to one every attempt would wait for its
# retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import entropy
import numpy as np
import pytest
import torch
from grids import kept
from hypothesis import settings

# "ci", "quick" (make test: a quarter of the examples) or "random" (a campaign).
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
TIMES = int(
    os.environ.get("HYPOTHESIS_TIMES", "20")
)  # how many times the examples of an ordinary run a campaign tries
SHARE, FEWEST = 4, 5  # a quick run tries one in so many examples, and at least so many
LONG = 0.25  # seconds that a test may have taken (times.json) to be in a quick run

# No file of failed examples either: what one run found must not decide what another tries.
settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=40)
settings.register_profile(
    "quick", derandomize=True, database=None, deadline=None, max_examples=40 // SHARE
)
settings.register_profile(
    "random", derandomize=False, deadline=None, max_examples=40, print_blob=True
)
settings.load_profile(PROFILE)


def seed_globally() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a module draws when it is imported does not depend on the modules before it."""
    if isinstance(collector, pytest.Module):
        seed_globally()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Nor what a test draws, or a fixture that it is the first to ask for, on
    the tests before it.
    """
    seed_globally()
    if PROFILE == "random" or item.get_closest_marker("entropy"):
        entropy.from_system()
    else:
        entropy.from_name(item.nodeid)


def pytest_collection_finish() -> None:
    set_apart()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """At the end of a file."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        set_apart()


def set_apart() -> None:
    """The garbage collector looks no more at what is there now: mostly imported modules, a million
    objects, over which every full collection went again (an eighth of the tests' time).
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" is asked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_cases_of_grids(items)
    mark_long(items)
    if PROFILE != "ci":
        change_numbers_of_examples(items)


def leave_cases_of_grids(items: list[pytest.Item]) -> None:
    """Of a test marked ``grid(keep, why)`` all cases but ``keep`` are slow."""
    cases: dict[tuple[Any, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("grid"):
            name = getattr(item, "originalname", item.name)
            cases.setdefault((item.parent, name), []).append(item)
    for alike in cases.values():
        mark = alike[0].get_closest_marker("grid")
        assert mark is not None
        keep, why = mark.args
        run = kept(len(alike), keep)
        for i, item in enumerate(alike):
            if i not in run:
                item.add_marker(pytest.mark.slow(why))


def mark_long(items: list[pytest.Item]) -> None:
    """What took ``LONG`` seconds when the suite was timed (``scripts/times_of_tests.py``), but for
    what catches a broken mechanism of the list.
    """
    here = Path(__file__).parent
    times = json.loads((here / "times.json").read_text(encoding="utf-8"))
    broken = (here.parent / "docs" / "attacks" / "broken.md").read_text(encoding="utf-8")
    catching = set(re.findall(r"\btest_\w+\b(?!\.py)", broken))
    for item in items:
        name = getattr(item, "originalname", item.name)
        if times.get(item.nodeid, 0.0) >= LONG and name not in catching:
            item.add_marker(pytest.mark.long)


def change_numbers_of_examples(items: list[pytest.Item]) -> None:
    """More examples than a test asks for by itself, and random ones, in a campaign; fewer in a
    quick run.
    """
    for item in items:
        test = getattr(item, "obj", None)
        if getattr(test, "is_hypothesis_test", False):
            own = test._hypothesis_internal_use_settings  # no public way to reach it
            number = own.max_examples
            few = min(number, max(FEWEST, number // SHARE))
            test._hypothesis_internal_use_settings = settings(
                own,
                max_examples=TIMES * number if PROFILE == "random" else few,
                derandomize=PROFILE != "random",
            )


EXAMINED: dict[object, tuple[bool, bool, int, float | None]] = {}
BEGUN: dict[object, tuple[str, ...]] = {}


def name_of(loss: Any) -> tuple[str, ...]:
    """A loss and the functions that it is made of."""
    inside = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
    parts = [loss if hasattr(loss, "__qualname__") else type(loss), *inside]
    parts += getattr(loss, "__dict__", {}).values()
    return tuple(f"{p.__module__}.{p.__qualname__}" for p in parts if hasattr(p, "__qualname__"))


def settings_of(module: Any) -> tuple[object, ...]:
    """Its class, and what it was told: switches, numbers, words and functions."""
    told = (bool, int, str, type(name_of))
    kind = type(module)
    return (
        kind.__module__,
        kind.__qualname__,
        *(
            (name, getattr(value, "__qualname__", value))
            for name, value in vars(module).items()
            if type(value) in told
        ),
    )


def looked_at(subject: Any, records: Any) -> tuple[object, ...]:
    """What a guard looks at: two of the same are decided alike. (An autocast that a loss begins is
    none of this: tests that speak of half precision look for themselves.)
    """
    from quietgrad.tensors import tensors_of

    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return (
        object() if re.search("half|b?float16|bf16|autocast|precision|door", test) else "",
        str(subject.model),
        tuple(settings_of(module) for module in subject.model.modules()),
        name_of(subject.per_example_loss),
        tuple((name, p.shape, p.dtype) for name, p in subject.layout.parameters.items()),
        tuple(module.training for module in subject.model.modules()),
        # Texts are padded to another length in every batch.
        tuple(
            (t.dtype, t.shape[1:] if t.is_floating_point() else t.dim())
            for t in tensors_of(records)
        ),
    )


@pytest.fixture
def examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that clip the same models again and again: the guard examines a model, its loss and
    the shapes of its records in the first call of this process that has them, and decides the same
    in the others; so with what a pair keeps of the first records.

    That is most of a tiny run's time. What the guard finds and misses is the subject of
    tests/attacks and tests/clipping/test_guard.py, where it looks every time.
    """
    from quietgrad.clipping.soundness.guard import Guard, is_guarded
    from quietgrad.tensors import batch_size_of

    begin, examine = Guard.begin, Guard.examine

    def begun(self: Any, subject: Any, batch: Any, *others: Any, **named: Any) -> None:
        known = self.verdict_of(subject)
        public = self.public is not None
        records = self.public if public else batch
        if self.has_begun(subject) or not batch_size_of(batch):
            return
        key = (*looked_at(subject, records), public, batch_size_of(records) > 1)
        if key not in BEGUN:
            begin(self, subject, batch, *others, **named)
            if known.kept is None:
                return
            BEGUN[key] = known.kept
        known.kept = BEGUN[key]

    def once(
        self: Any, subject: Any, batch: Any, size: int, step: int, captures: bool, *others: Any
    ) -> bool:
        known = self.verdict_of(subject)
        records = batch if self.public is None else self.public
        if batch_size_of(records) == 1:
            return examine(self, subject, batch, size, step, captures, *others)
        key = (
            *looked_at(subject, records),
            (size > 1, is_guarded(step), captures),
            (known.together > 0, known.captured, known.remembers_nothing),
        )
        if key not in EXAMINED:
            together = examine(self, subject, batch, size, step, captures, *others)
            EXAMINED[key] = (together, known.captured, known.together, known.roundoff)
        together, known.captured, known.together, known.roundoff = EXAMINED[key]
        known.remembers_nothing, known.last_step = True, step
        return together

    monkeypatch.setattr(Guard, "begin", begun)
    monkeypatch.setattr(Guard, "examine", once)


@pytest.fixture(scope="module")
def first_looks_alone() -> Iterator[None]:
    """For tests of many short trainings: guards look at a run's first release, and at the second
    and the fourth no more. Looks were seven tenths of such a test's time; that they are made, and
    what they see, is the subject of others.
    """
    from quietgrad.clipping.soundness import guard

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "is_guarded", lambda step: step == 0)
        yield
