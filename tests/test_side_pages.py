"""The code of docs/training_loss.md and docs/adaptive_clipping.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quietgrad.training.settings.config import TrainConfig, config_from
from quietgrad.training.settings.overrides import tomllib

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, kind: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("training_loss.md", r"training loss \d\.\d{3} \+- \d\.\d{3} \(private estimate\)\n"),
        ("adaptive_clipping.md", r"clipping norm \d+\.\d\d, noise \d+\.\d\d\n"),
    ],
)
def test_the_code_of_the_pages_runs(
    page: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks(page, "python")
    exec(compile(code, page, "exec"), {"__name__": "page"})
    assert re.fullmatch(printed, capsys.readouterr().out)


@pytest.mark.parametrize("page", ["training_loss.md", "adaptive_clipping.md"])
def test_the_settings_of_the_pages_are_read(page: str) -> None:
    (text,) = blocks(page, "toml")
    assert config_from(tomllib.loads(text)) != TrainConfig()
