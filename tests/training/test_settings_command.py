"""``quietgrad settings``: every key is explained, and found by its name."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from quietgrad.cli.settings import chosen, meaning_of
from quietgrad.records import hints_of
from quietgrad.training.settings.config import TABLES

KEYS = [
    (kind, key) for table in TABLES.values() for kind in table.kinds.values()
    for key in hints_of(kind)
]  # fmt: skip
Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(("kind", "key"), KEYS, ids=lambda value: getattr(value, "__name__", value))
def test_every_key_of_every_record_is_explained(kind: type, key: str) -> None:
    meaning = meaning_of(kind, key)
    assert meaning and not meaning.startswith("see `"), meaning


def test_a_key_stands_there_for_each_method_that_has_it() -> None:
    assert len(chosen(None)) > 90
    assert chosen("bands") == chosen("noise.bands") != []
    assert [s.words for s in chosen("bands")] == [["banded", "noisecurve"]]
    assert {w: s.default for s in chosen("denoising.delay") for w in s.words} == {
        "amplify": 8,
        "persistent": 0,
        "bulk-on-momentum": 0,
    }
    (budget,) = chosen("memory_budget")
    assert "bytes" in budget.meaning and budget.kind == "a number above 0"
    assert {s.key for s in chosen("privacy")} >= {"target_epsilon", "max_grad_norm"}
    with pytest.raises(
        ValueError, match=r"KEY='noise.band' is no setting; did you mean noise.band"
    ):
        chosen("noise.band")
    with pytest.raises(ValueError, match="`quietgrad settings` has them all"):
        chosen("xyzzy")


def test_the_command_prints_for_people_and_for_programs(quietgrad: Run) -> None:
    code, out, _ = quietgrad("settings", "memory_budget")
    assert code == 0 and "[performance]" in out and "bytes" in out
    code, out, _ = quietgrad("settings", "method", "--json")
    found = {s["table"]: s for s in json.loads(out)["settings"]}
    assert code == 0 and "toeplitz" in found["noise"]["kind"]
    assert found["denoising"]["default"] == "none"
    code, _, err = quietgrad("settings", "bandz")
    assert code == 2 and "did you mean bands" in err
