"""What a newcomer types first, and what is said of it: the words of other libraries, a file of
records for a configuration, a guess that was not the one meant.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quietgrad.cli.beside.chosen import too_long
from quietgrad.training.settings.config import load_config
from quietgrad.training.settings.reading import ELSEWHERE, outlined

Run = Callable[..., tuple[int, str, str]]


def test_words_of_other_libraries_name_keys_and_are_none() -> None:
    tables = {name: table.keys() for name, table in outlined().items()}
    every = {key for keys in tables.values() for key in keys}
    for own, others in ELSEWHERE.items():
        table, _, key = own.partition(".")
        assert key in tables[table] and not every & set(others), own


@pytest.mark.parametrize("place", ["", "training.", "optimizer."])
def test_a_word_of_another_library_is_told_in_ours(place: str, tmp_path: Path) -> None:
    """Before: "unknown key 'lr'; did you mean 'floor'?"."""
    said = r"unknown key .*lr'?; did you mean 'optimizer.learning_rate'\?"
    with pytest.raises(ValueError, match=said):
        load_config(None, [f"{place}lr=0.1"])
    if place:
        file = tmp_path / "a.toml"
        file.write_text(f"[{place[:-1]}]\nlr = 0.1\n")
        with pytest.raises(ValueError, match=said):
            load_config(file)


def test_settings_finds_a_key_by_its_name_elsewhere(quietgrad: Run) -> None:
    """Before: "did you mean floor, layers?"."""
    for name in ("lr", "training.lr"):
        code, _, err = quietgrad("settings", name)
        assert code == 2 and "did you mean optimizer.learning_rate?" in err


@pytest.mark.parametrize("key", ["target_epsilon", "noise_multiplier", "max_grad_norm"])
@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1.0"])
def test_amounts_of_privacy_are_judged_before_records_are_read(
    key: str, value: str, quietgrad: Run
) -> None:
    """Before, an epsilon without end came as far as a solver's own "cannot continue"."""
    code, _, err = quietgrad("train", "--set", "data.source=none.csv", "--set", f"{key}={value}")
    assert code == 2 and err.startswith(f"error: privacy.{key}=") and err.count("\n") == 1
    assert "finite" in err or "above 0" in err


def test_records_in_place_of_a_configuration(quietgrad: Run, tmp_path: Path) -> None:
    file = tmp_path / "my people.csv"
    file.write_text("age,income\n20,low\n")
    code, _, err = quietgrad("train", file)
    assert code == 2 and "a file of records" in err
    assert f"quietgrad init '{file}' -o 'my people.toml'" in err


def test_init_says_what_is_learnt_and_from_what(quietgrad: Run, tmp_path: Path) -> None:
    """Where the last column is a measurement, the one before is guessed: that is to be seen."""
    table, texts = tmp_path / "pay.csv", tmp_path / "texts.csv"
    table.write_text(
        "age,job,pay\n" + "".join(f"{i % 45},{'ab'[i % 2]},{i}.5\n" for i in range(200))
    )
    texts.write_text(
        "review,stars\n" + "".join(f"a film of many words {i},{i % 2}\n" for i in range(200))
    )
    code, out, _ = quietgrad("init", table, "-o", tmp_path / "pay.toml")
    assert code == 0 and "which learns 'job' from the other columns" in out
    code, out, _ = quietgrad("init", texts, "-o", tmp_path / "texts.toml")
    assert code == 0 and "which learns 'stars' from 'review'" in out
    code, _, err = quietgrad("init", table, "--label", "pay", "-o", tmp_path / "other.toml")
    assert code == 2 and "no class to learn" in err
    code, out, _ = quietgrad("check", table, "--label", "pay")
    assert code == 1 and "make classes of them (low, high), or learn them in a loop" in out


def test_few_whole_numbers_look_like_numbers_too(quietgrad: Run, tmp_path: Path) -> None:
    """As inputs of a table they are numbers, and "classes" alone made a reader doubt that."""
    file = tmp_path / "a.csv"
    file.write_text("age,pay\n" + "".join(f"{i % 45},{'ab'[i % 2]}\n" for i in range(200)))
    _, out, _ = quietgrad("check", file)
    assert "numbers or classes" in out.replace("\n", " ")


@pytest.mark.parametrize(
    ("seconds", "hours", "said"),
    [
        (38.0, 0.01, "about 38 s, and training.hours = 0.01 are allowed (36 s)"),
        (9000.0, 2.0, "about 2.5 hours, and training.hours = 2 are allowed:"),
    ],
)
def test_short_forecasts_are_told_in_seconds(seconds: float, hours: float, said: str) -> None:
    """Before: "about 0.0 hours"."""
    record = {"predicted_seconds": seconds, "hours_allowed": hours, "settings": []}
    assert said in (too_long(record) or "")
