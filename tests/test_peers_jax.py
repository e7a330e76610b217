"""JAX-Privacy's column in the table of peers is what benchmarks/results/clipping_peers_jax.json
holds, and that is a comparison of like with like.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = runpy.run_path(str(ROOT / "scripts" / "peers_figure.py"))


def regimes_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))["regimes"]
    return found


def cells_of(page: str, head: str) -> list[str]:
    """A column of a page's first table that has it."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(f"| {head} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line.rstrip().removesuffix("|").rpartition("|")[2].strip())
    return rows


def test_the_column_is_the_fastest_way_over_the_non_private_step_of_jax() -> None:
    measured = regimes_of("clipping_peers_jax.json")
    wanted = []
    assert "llama-512" in measured and set(measured) <= set(FIGURE["REGIMES"])
    for regime in FIGURE["REGIMES"]:
        if regime not in measured:
            wanted.append("not measured")
            continue
        ways = {n: r for n, r in measured[regime]["methods"].items() if n != "non-private"}
        ranked = sorted(ways.values(), key=lambda row: float(row["time_ratio"]["median"]))
        wanted.append(
            f"{ranked[0]['time_ratio']['median']:.2f} / {ranked[0]['memory_ratio']:.2f}"
            if ranked
            else "fails"
        )
    assert cells_of("README.md", "JAX-Privacy") == wanted


def test_the_ways_and_the_seconds_are_on_the_page() -> None:
    assert FIGURE["table_of_jax"]() in (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("regime", sorted(regimes_of("clipping_peers_jax.json")))
def test_programs_in_jax_are_those_of_torch(regime: str) -> None:
    ours = regimes_of("clipping_peers.json")[regime]
    theirs = regimes_of("clipping_peers_jax.json")[regime]
    for key in ("batch", "length", "parameters", "trainable_parameters"):
        assert theirs[key] == ours[key], key
    # Of losses, gradients and clipped sums, in the norm of the whole: rounding, and what certified
    # bounds shorten records by (one part in 1024).
    off = theirs["difference_from_torch"]
    assert set(off) == {"losses", "gradient", "clipped_sum"} and max(off.values()) < 2e-3
    assert theirs["methods"]["non-private"]["memory_ratio"] == 1.0
    assert theirs["methods"]["non-private"]["time_ratio"]["median"] == 1.0
    assert any(n.startswith("jax-privacy") for n in {**theirs["methods"], **theirs["failed"]})


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("jax_privacy", reason="JAX is compared where it is installed beside torch")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import clipping_peers_jax

    yield clipping_peers_jax
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.slow("trains nothing, but compiles a Llama twice in JAX")
def test_a_program_that_differs_is_not_measured(benchmark: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.npz"
    benchmark.write_program("llama-lora", program)
    assert max(benchmark.check("llama-lora", program).values()) < benchmark.TOLERANCE
    with np.load(program) as file:
        arrays = dict(file)
    arrays["frozen/model.norm.weight"] = 1.01 * arrays["frozen/model.norm.weight"]
    np.savez(program, **arrays)
    with pytest.raises(SystemExit, match="not the program of torch"):
        benchmark.check("llama-lora", program)
