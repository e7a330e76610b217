"""The code of docs/schedules.md runs as it stands, one block after the other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from quietgrad.training.settings.config import config_from

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_page_runs(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    scope: dict[str, object] = {}
    released = []
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), scope)
        released.append(scope["run"].released)  # type: ignore[attr-defined]
    assert released == [30, 20, 70]
    told = capsys.readouterr().out
    assert "epsilon 2.00, noise" in told and "2.00 becomes" in told
    for block in re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL):
        config_from(tomllib.loads(block))
    (phases,) = re.findall(r"`phases = (\[.*?\])`", text)
    config = config_from({"schedules": tomllib.loads(f"phases = {phases}")})
    assert len(config.schedules.of_phases) == 2
