"""Every script of the gallery is short, is on its page, and runs at smoke size."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("examined_once")

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "gallery").glob("*.py"))
LONGEST = 60  # lines
SHOWN = {
    "text", "images", "table", "language_model", "many_processes",
    "users", "noisecurve", "denoising", "audit", "custom_layer",
}  # fmt: skip


@pytest.fixture(autouse=True)
def rules_are_put_back() -> Iterator[None]:
    """Of layers that a script brings."""
    from quietgrad.clipping.norms.rules import registry

    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)


def test_the_gallery_is_what_its_page_says() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert {path.stem for path in SCRIPTS} == SHOWN
    assert [path.stem for path in SCRIPTS if f"`examples/gallery/{path.name}`" not in page] == []
    for path in SCRIPTS:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST, path.name


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_of_the_gallery_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr().out
    spent = [float(number) for number in re.findall(r"epsilon (\d+\.\d+)", told)]
    assert spent and 0 < max(spent) <= 8.0


@pytest.mark.distributed
@pytest.mark.slow("two processes, each of which imports torch")
def test_the_script_of_several_processes_runs_on_two() -> None:
    path = ROOT / "examples" / "gallery" / "many_processes.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(path), "--smoke"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"epsilon \d", done.stdout)) == 1  # one process says it
