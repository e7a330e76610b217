"""Python of pages that are about something else than how to write it runs as it stands; and the
errata's script gives the numbers that the page has from it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page_blocks import ROOT, blocks_of, commands


def scope_of(page: str, scope: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a page's Python leaves behind."""
    scope = {"__name__": "page"} if scope is None else scope
    for block in blocks_of(page, "python"):
        exec(compile(block.text, page, "exec", dont_inherit=True), scope)
    return scope


def test_the_code_of_denoising_runs() -> None:
    scope = scope_of("docs/denoising.md")
    assert scope["run"].released == scope["plan"].steps and 0 < scope["run"].epsilon() <= 2.0


def test_the_code_of_noisecurve_runs() -> None:
    """Shaped noise has another matrix than noise that is correlated for sums alone."""
    from quietgrad.noise import BandedNoise
    from quietgrad.plan import PrivacyConfig

    scope = scope_of("docs/noisecurve.md")
    config = PrivacyConfig(
        target_epsilon=2.0, expected_batch_size=200, steps=100, noise=BandedNoise(bands=4)
    )
    shaped, summed = scope["plan"], config.build(2000)
    assert 0 < shaped.epsilon <= 2.0 and shaped.steps == 100
    assert shaped.mixing.workload != summed.mixing.workload
    assert shaped.mixing.objective != pytest.approx(summed.mixing.objective, rel=0.01)


@pytest.mark.slow("twelve thousand runs of a small model, and one with canaries")
def test_the_code_of_auditing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is refuted, but by chance: at confidence 0.95, in two audits."""
    scope = scope_of("docs/auditing.md")
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 and shown[0].startswith("claimed 4.38, shown ")
    assert 2.5 < float(shown[0].split("shown ")[1].split(":")[0]) < 5.0
    # A model of 22 entries, which 500 canaries shared, let 0.00 to 0.43 show.
    assert scope["report"].lower_bound > 1.0 and scope["report"].claimed <= 8.0


def test_one_step_is_the_readmes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = blocks_of("README.md", "python")[0].text.split("with plan.start()")[0]
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(before, "README.md", "exec", dont_inherit=True), scope)
    scope_of("docs/follow_one_step.md", scope)
    assert (tmp_path / "ledger.jsonl").exists() and scope["run"].released == scope["plan"].steps


@pytest.mark.slow("ten seconds of small experiments, one for each entry")
def test_the_errata_are_what_their_script_measures(tmp_path: Path) -> None:
    ((block,), found) = (blocks_of("docs/errata.md", "sh"), tmp_path / "evidence.json")
    ((python, script),) = commands(block.text)
    assert python == "python"
    command = [sys.executable, script, "--output", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = json.loads((ROOT / "docs" / "errata_evidence.json").read_text(encoding="utf-8"))
    assert numbers(json.loads(found.read_text())) == pytest.approx(
        numbers(kept), rel=0.02, abs=1e-6
    )


def numbers(tree: Any, place: str = "") -> dict[str, float]:
    """Of a tree of JSON, by their places; not the time that it took."""
    if isinstance(tree, dict):
        items = [(f"{place}/{key}", value) for key, value in tree.items()]
    elif isinstance(tree, list):
        items = [(f"{place}/{i}", value) for i, value in enumerate(tree)]
    else:
        is_one = isinstance(tree, int | float) and "second" not in place
        return {place: float(tree)} if is_one else {}
    return {name: value for key, below in items for name, value in numbers(below, key).items()}
