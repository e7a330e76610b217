"""``benchmarks/gpu_ranks.py`` on two processes without GPUs: the code that would run on them."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.world import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("first_looks_alone")]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_ranks.py"
SETTINGS = argparse.Namespace(
    width=32, layers=1, length=8, physical=8, batch=16, rounds=2, steps=1, processes=2
)


@pytest.fixture(scope="module")
def gpu_ranks() -> Any:
    sys.path.append(str(SCRIPT.parent))  # what stands beside it
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    return module


def one_rank(rank: int, script: Any, folder: str) -> None:
    found = {way: script.releases(way, "cpu") for way in script.WAYS}
    found["timed"] = script.timed("cpu", SETTINGS)
    torch.save(found, Path(folder, f"found{rank}.pt"))


@pytest.mark.slow("two processes train in every way that the script has")
def test_releases_are_compared_and_steps_timed(gpu_ranks: Any, tmp_path: Path) -> None:
    gpu_ranks.alone(0, str(tmp_path), "cpu")
    found = on_ranks(2, tmp_path / "ranks", one_rank, gpu_ranks, str(tmp_path))
    assert found == [None, None]
    told = gpu_ranks.summary(str(tmp_path), SETTINGS)
    assert told["difference"] == {"copied": 0.0, "sharded": 0.0}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in told["seconds"].values())
    assert told["time_ratio"]["least"] <= told["time_ratio"]["median"]


def test_a_difference_is_seen(gpu_ranks: Any, tmp_path: Path) -> None:
    one = torch.zeros(2, 3)
    torch.save(one, tmp_path / "alone.pt")
    timed = {"private": [2.0], "plain": [1.0], "private bytes": [3], "bytes": [2]}
    for rank in range(2):
        other = {way: one + rank / 4 for way in gpu_ranks.WAYS}
        torch.save(other | {"timed": timed}, tmp_path / f"found{rank}.pt")
    told = gpu_ranks.summary(str(tmp_path), SETTINGS)
    assert told["difference"] == {"copied": 0.25, "sharded": 0.25}
    assert told["time_ratio"]["median"] == 2.0 and told["memory_ratio"] == 1.5


def test_the_report_is_printed_and_its_folder_made(
    gpu_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_ranks.tell("{}", tmp_path / "new" / "report.json")
    assert (tmp_path / "new" / "report.json").read_text() == "{}\n"
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        gpu_ranks.tell("told", tmp_path / "file" / "report.json")
    assert capsys.readouterr().out == "{}\ntold\n"
