"""The loops of docs/loops.md run as they stand, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quietgrad.checks import SettingsWarning

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"


def blocks_of_the_page() -> tuple[list[str], str]:
    """All blocks, and what stands before the first run."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return blocks, blocks[0].split("with plan.start()")[0]


def test_the_loops_of_the_page_run(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks, before = blocks_of_the_page()
    released = []
    for block in blocks:  # each in place of the first, on a new model
        scope: dict[str, object] = {}
        exec(compile(before, str(PAGE), "exec"), scope)
        exec(compile(block, str(PAGE), "exec"), scope)
        released.append(scope["run"].released)  # type: ignore[attr-defined]
    assert released == [20, 20, 5, 3, 10]
    assert "epoch 1: epsilon 2.000" in capsys.readouterr().out


def test_the_loop_that_saves_goes_on_with_what_it_saved(tmp_path: Path, monkeypatch) -> None:
    """Stopped in its second pass: the first pass's weights are there, and no release twice."""
    monkeypatch.chdir(tmp_path)
    blocks, before = blocks_of_the_page()
    (saves,) = (block for block in blocks if "saved.pt" in block)
    step = "            schedule.step()\n"
    stops = saves.replace(step, step + "            if run.released == 13: raise KeyError\n")
    assert stops != saves
    before = before.replace("import torch\n", "import torch\ntorch.manual_seed(0)\n", 1)

    def started(block: str) -> dict[str, Any]:
        scope: dict[str, Any] = {}
        exec(compile(before, str(PAGE), "exec"), scope)
        exec(compile(block, str(PAGE), "exec"), scope)
        return scope

    with pytest.raises(KeyError):
        started(stops)
    kept = torch.load("run/saved.pt")
    on = started(saves)
    assert on["run"].released == 20 and on["schedule"].last_epoch == 10 + 20 - 13
    moved = on["model"][0].weight - kept[0]["0.weight"]
    fresh = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    assert 0 < moved.norm() < (on["model"][0].weight - fresh[0].weight).norm()
    assert not Path("run/keys.json").exists()
    with pytest.warns(SettingsWarning, match="all 20 releases"):
        again = started(saves)
    assert torch.equal(again["model"][0].weight, on["model"][0].weight)


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
