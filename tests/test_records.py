"""Records that judge themselves: the same check for Python and for files, and what is no key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from quietgrad.clipping.settings import Clipping, Performance
from quietgrad.noise.methods import BandedNoise, IndependentNoise, MatrixNoise
from quietgrad.records import Above0, Amount, Count, hints_of, judge
from quietgrad.training.optimizers import SGD, AdamW
from quietgrad.training.settings.config import TABLES, TrainConfig, config_from, load_config
from quietgrad.training.settings.tables import ModelTable, PrivacyTable, TrainingTable


@dataclass(frozen=True)
class Everything:
    count: Count = 1
    rate: Above0 | None = None
    word: Literal["a", "b"] | Count = "a"
    names: list[str] = field(default_factory=list)
    rates: tuple[Amount, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    free: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        judge(self)


def test_fields_become_what_their_annotations_say() -> None:
    found = Everything(rate=2, word=3, names=("x",), rates=[1], shares={"*": 1})  # type: ignore[arg-type]
    assert (found.rate, found.word, found.names, found.rates) == (2.0, 3, ["x"], (1.0,))
    assert isinstance(found.rate, float) and isinstance(found.rates[0], float)
    assert found.shares == {"*": 1.0}
    odd: Any = Everything(free="nothing that a file holds is not judged")  # type: ignore[arg-type]
    assert odd.free and "free" not in hints_of(Everything)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count=0 is below 1: use a whole number"),
        ({"count": True}, "count=True must be a whole number of at least 1"),
        ({"count": 1.0}, "count=1.0 must be a whole number"),
        ({"count": None}, "count=None must be a whole number"),
        ({"rate": 0}, "rate=0.0 must be positive"),
        ({"rate": math.nan}, "rate=nan must be a finite number"),
        ({"rate": "fast"}, "rate='fast' must be a number above 0, not a string"),
        ({"word": "c"}, "word='c' is unknown; valid: a, b"),
        ({"word": 0}, "word=0 is below 1"),
        ({"word": 1.5}, "word=1.5 must be 'a' or 'b' or a whole number"),
        ({"names": "x"}, "names='x' must be a list, each entry a string"),
        ({"names": [1]}, r"names=\[1\] must be a list, each entry a string"),
        ({"rates": [1, -1]}, r"rates\[1\]=-1.0 is below 0"),
        ({"shares": {"*": "much"}}, "shares=.* must be a table"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name_and_value(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Everything(**values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BandedNoise(bands=0), "bands=0"),
        (lambda: BandedNoise(bands="many"), "bands='many' is unknown"),  # type: ignore[arg-type]
        (lambda: BandedNoise(source="dice"), "source='dice'"),  # type: ignore[arg-type]
        (lambda: IndependentNoise("dice"), "source='dice'"),  # type: ignore[arg-type]
        (lambda: Clipping(estimator="exat"), "estimator='exat'.*'exact'"),  # type: ignore[arg-type]
        (lambda: Clipping(sketch_dim=0), "sketch_dim=0"),
        (lambda: Clipping("hutch", groups="layer"), "groups='layer' with a sketched estimator"),
        (lambda: Clipping(layers={"*": "spook"}), "'spook'"),
        (lambda: Performance(max_physical_batch_size=0), "max_physical_batch_size=0"),
        (lambda: Performance(memory_budget=0), "memory_budget=0.0"),
        (lambda: AdamW(learning_rate=0), "learning_rate=0.0"),
        (lambda: SGD(momentum=-1), "momentum=-1.0"),
        (lambda: ModelTable(tune="head", random_head=True), "random_head=True freezes the head"),
        (lambda: PrivacyTable(target_epsilon=1, noise_multiplier=1), "both given"),
        (lambda: TrainingTable(steps=1, epochs=1), "both given"),
        (lambda: TrainingTable(checkpoint_every=0), "checkpoint_every=0"),
    ],
)
def test_components_judge_themselves_in_python(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_matrix_is_one_that_was_found() -> None:
    with pytest.raises(TypeError, match="mixing must be what"):
        MatrixNoise([[1.0]])  # type: ignore[arg-type]


def test_every_table_is_a_record_and_reads_back(tmp_path: Path) -> None:
    assert list(TABLES) == [f.name for f in dataclasses.fields(TrainConfig)]
    given = {
        "clipping": {"groups": {"head.*": 2, "*": 1}, "scaling": "automatic"},
        "noise": {"method": "banded", "bands": 4},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "performance": {"memory_budget": 1e9, "engine": "one-example"},
    }
    config = config_from(given)
    assert config.clipping == Clipping(groups={"head.*": 2.0, "*": 1.0}, scaling="automatic")
    assert (config.noise, config.optimizer) == (BandedNoise(4), SGD(momentum=0.9))
    assert config_from(config.to_dict()) == config
    saved = tmp_path / "config.toml"
    saved.write_text(config.to_toml())
    assert load_config(saved) == config
