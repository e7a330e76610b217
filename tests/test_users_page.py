"""What docs/users.md shows runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from quietgrad.training.settings.config import config_from

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (Path(__file__).parents[1] / "docs" / "users.md").read_text(encoding="utf-8")


def test_the_loop_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    block, door = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    scope: dict[str, object] = {"__name__": "page"}
    exec(compile(block, "docs/users.md", "exec"), scope)
    assert scope["run"].released == 8  # type: ignore[attr-defined]
    said = capsys.readouterr().out
    assert re.match(r"epsilon (3\.99\d|4\.000) for 200 users \(add-remove-user\)", said)
    exec(compile(door, "docs/users.md", "exec"), scope)
    assert scope["Classifier"]().record_owner is scope["owners"]  # type: ignore[operator]


def test_the_configuration_of_the_page_is_read() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    config = config_from(tomllib.loads(block))
    assert config.data.user == "customer" and config.users.choice == "fresh"
