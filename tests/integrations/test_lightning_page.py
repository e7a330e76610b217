"""The code of docs/lightning.md runs as it stands, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lightning_modules import ADVICE

pytestmark = ADVICE
PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    scope: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    assert capsys.readouterr().out.count("20 steps, epsilon 3.000") == 2
    assert (tmp_path / "run" / "ledger.jsonl").exists()
