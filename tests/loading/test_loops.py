"""The loops of docs/loops.md run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"


def test_the_loops_of_the_page_run(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    scope: dict[str, object] = {}
    released = []
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
        released.append(scope["run"].released)  # type: ignore[attr-defined]
    assert released == [20, 5, 3, 10]
    assert "epoch 1: epsilon 2.000" in capsys.readouterr().out
