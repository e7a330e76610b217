"""The loops of docs/loops.md run as they stand, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"


def test_the_loops_of_the_page_run(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    before = blocks[0].split("with plan.start()")[0]
    released = []
    for block in blocks:  # each in place of the first, on a new model
        scope: dict[str, object] = {}
        exec(compile(before, str(PAGE), "exec"), scope)
        exec(compile(block, str(PAGE), "exec"), scope)
        released.append(scope["run"].released)  # type: ignore[attr-defined]
    assert released == [20, 5, 3, 10]
    assert "epoch 1: epsilon 2.000" in capsys.readouterr().out


LEFT_OPEN = """
import torch
from quietgrad import PrivacyConfig

records = [{"x": torch.ones(2)}] * 20
plan = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=10, steps=3).build(20)
run = plan.start()
batches = iter(run.loader(records))
next(batches)
"""


def test_a_script_may_end_within_its_loop() -> None:
    """Python takes modules apart before it collects what is left of a loop."""
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
