"""A resume with other privacy settings is refused in the words of config.toml: names, and values of
before and now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import interrupt_at, train

from quietgrad.training.prepare import Prepared


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"privacy.target_epsilon": 5.0}, "privacy.target_epsilon was 4.0 and is now 5.0;"),
        ({"training.steps": 9}, "training.steps was 7 and is now 9;"),
        ({"clipping.estimator": "hutch"}, " and is now 'hutch';"),
        (
            {"noise.method": "banded", "noise.bands": 2},
            "noise.method was 'independent' and is now 'banded'; noise.bands was not set and is "
            "now 2;",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_it_names_the_settings(settings: dict[str, Any], changed: dict, said: str) -> None:
    values = settings | {"training.steps": 7}
    train(values, report=interrupt_at(2))
    with pytest.raises(ValueError, match="resume with a changed privacy setting: ") as refused:
        train(values | changed, resume=True)
    text = str(refused.value)
    assert said in text and "{" not in text and "begin a new run directory" in text


def test_a_change_that_has_no_name_there_is_named_as_in_the_ledger(
    settings: dict[str, Any], csv_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of records, in the same file: before frozen layers run over them."""
    own = tmp_path / "own.csv"  # other tests read the one that all share
    rows = csv_file.read_text(encoding="utf-8").splitlines(keepends=True)
    own.write_text("".join(rows), encoding="utf-8")
    values = settings | {"training.steps": 7, "data.source": str(own)}
    train(values, report=interrupt_at(2))
    own.write_text("".join(rows[:-6]), encoding="utf-8")
    monkeypatch.setattr(Prepared, "prefix_cache", lambda *_, **__: pytest.fail("they ran"))
    with pytest.raises(ValueError, match=r"event\.\w+ was [\d.]+ and is now [\d.]+") as refused:
        train(values, resume=True)
    assert "{" not in str(refused.value)
    # What the others follow from comes first, and the reader is told what it means.
    assert str(refused.value).startswith("resume with a changed privacy setting: dataset_size was ")
    assert "; the records are others than at the first start: resume with" in str(refused.value)
