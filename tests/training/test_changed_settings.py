"""A resume with other privacy settings is refused in the words of config.toml: names, and values of
before and now.
"""

from __future__ import annotations

from typing import Any

import pytest
from tiny_runs import interrupt_at, train


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
    settings: dict[str, Any], csv_file: Any
) -> None:
    """Another number of records, in the same file."""
    train(settings | {"training.steps": 7}, report=interrupt_at(2))
    rows = csv_file.read_text(encoding="utf-8").splitlines(keepends=True)
    csv_file.write_text("".join(rows[:-6]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"event\.\w+ was [\d.]+ and is now [\d.]+") as refused:
        train(settings | {"training.steps": 7}, resume=True)
    assert "{" not in str(refused.value)
