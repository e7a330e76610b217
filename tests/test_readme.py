"""The README's examples are a test: they run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_python_example_runs_and_learns(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks, "the README shows no Python example"
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
        assert 0 < scope["run"].epsilon() <= 2.0  # type: ignore[attr-defined]
    assert "epsilon" in capsys.readouterr().out
