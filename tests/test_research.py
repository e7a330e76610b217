"""Research measurements: asked for explicitly, marked, and right."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quietgrad import PrivacyConfig
from quietgrad.cli.app import app
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.denoising import PublishedShrinkage, detection_threshold
from quietgrad.events import NotPrivate, SensitivityClaim
from quietgrad.ledger import read_ledger
from quietgrad.noise import NoisySum
from quietgrad.research import alignment, singular_values

SYNTHETIC = NotPrivate("made up")


def example() -> tuple[ClippedSum, NoisySum]:
    generator = torch.Generator().manual_seed(0)
    u, v = (
        torch.nn.functional.normalize(torch.randn(k, generator=generator), dim=0) for k in (60, 90)
    )
    clean = {"w": 4 * detection_threshold((60, 90), 1.0) * torch.outer(u, v), "b": torch.ones(60)}
    noisy = {name: g + torch.randn(g.shape, generator=generator) for name, g in clean.items()}
    return ClippedSum(clean, SensitivityClaim(1.0)), NoisySum(noisy, 1.0)


def test_the_switch_must_be_given() -> None:
    clipped, noisy = example()
    for wrong in (True, False, None, "yes"):
        with pytest.raises(TypeError, match=r"not_private=run\.give_up_privacy\(reason\)"):
            alignment(clipped, noisy, PublishedShrinkage(), not_private=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"not_private=run\.give_up_privacy\(reason\)"):
            singular_values(clipped, noisy, "w", not_private=wrong)  # type: ignore[arg-type]


def test_a_sum_of_a_run_needs_the_runs_own_permission() -> None:
    # Before: any reason would do, and the run went on telling its epsilon.
    plan = PrivacyConfig(noise_multiplier=1.0, sample_rate=0.5, steps=2).build(20)
    with plan.start() as run:
        examples = len(next(run.batches()))
        total = run.contribution({"w": torch.ones(examples, 3, 3)}, examples)
        noisy = run.release(total)
        with pytest.raises(ValueError, match=r"not from the run.*run\.give_up_privacy\(reason\)"):
            alignment(total, noisy, PublishedShrinkage(), not_private=SYNTHETIC)
        with pytest.raises(ValueError, match="not from the run"):
            singular_values(total, noisy, "w", not_private=SYNTHETIC)
        assert run.epsilon() < math.inf
        permission = run.give_up_privacy("made up")
        assert len(singular_values(total, noisy, "w", not_private=permission)) == 3
        assert run.epsilon() == math.inf


def test_another_runs_permission_is_not_taken(tmp_path: Path) -> None:
    plan = PrivacyConfig(noise_multiplier=1.0, sample_rate=0.5, steps=2).build(20)
    noisy = example()[1]
    with plan.start() as other, plan.start(tmp_path / "ledger.jsonl") as run:
        early = run.contribution({"w": torch.ones(3, 60, 90)}, 3)  # before any batch
        examples = len(next(run.batches()))
        total = run.contribution({"w": torch.ones(examples, 60, 90)}, examples)
        given = other.give_up_privacy("made up")
        for clipped in (early, total, total + run.contribution({"w": torch.ones(60, 90)})):
            with pytest.raises(ValueError, match=r"not from the run.*give_up_privacy\(reason\)"):
                singular_values(clipped, noisy, "w", not_private=given)
            with pytest.raises(ValueError, match="not from the run"):
                singular_values(clipped, noisy, "w", not_private=SYNTHETIC)
        assert run.epsilon() < math.inf
    # Its own: of any session.
    with plan.start(tmp_path / "ledger.jsonl") as run:
        given = run.give_up_privacy("made up")
    assert len(singular_values(early, noisy, "w", not_private=given)) == 3
    assert len(singular_values(total, noisy, "w", not_private=given)) == 3


def test_a_run_that_is_looked_into_has_no_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = PrivacyConfig(
        noise_multiplier=1.0, target_delta=1e-5, expected_batch_size=10, steps=4
    ).build(100)
    ledger, private = tmp_path / "ledger.jsonl", tmp_path / "private.jsonl"
    for path in (ledger, private):
        with plan.start(path) as run:
            examples = len(next(run.batches()))
            run.release(run.contribution({"w": torch.zeros(examples, 3, 3)}, examples))
            assert 0 < run.epsilon() < math.inf
            if path == ledger:
                for nothing in ("", "  ", None):
                    with pytest.raises(ValueError, match="say why these data need no protection"):
                        run.give_up_privacy(nothing)  # type: ignore[arg-type]
                assert run.epsilon() < math.inf
                assert run.give_up_privacy("synthetic") == NotPrivate("synthetic")
                assert run.epsilon() == math.inf
    # For good: in later sessions, and for whoever reads the ledger.
    with plan.start(ledger) as run:
        assert run.released == 1 and run.epsilon() == math.inf
    assert (
        read_ledger(ledger).not_private == "synthetic" and read_ledger(private).not_private is None
    )
    runner = CliRunner()
    shown = runner.invoke(app, ["epsilon", "--ledger", str(ledger)])
    assert shown.exit_code == 0 and "No epsilon: this run gave up privacy (synthetic)" in " ".join(
        shown.output.split()
    )
    found = json.loads(runner.invoke(app, ["epsilon", "--ledger", str(ledger), "--json"]).output)
    assert (
        found["epsilon"] is None and found["not_private"] == "synthetic" and found["releases"] == 1
    )
    assert (
        json.loads(runner.invoke(app, ["epsilon", "--ledger", str(private), "--json"]).output)[
            "epsilon"
        ]
        > 0
    )


def test_improvement_is_positive_where_a_spike_stands_out() -> None:
    clipped, noisy = example()
    found = alignment(clipped, noisy, PublishedShrinkage(), not_private=SYNTHETIC)
    assert found.improvement > 0.1 and "not private" in found.private
    (layer,) = found.layers
    assert layer.name == "w" and layer.after > layer.before and layer.ratio > 1.02
    a, b = clipped.gradients["w"].flatten(), noisy.gradients["w"].flatten()
    assert layer.before == pytest.approx(
        float(torch.nn.functional.cosine_similarity(a, b, dim=0)), rel=1e-5
    )


def test_singular_values() -> None:
    clipped, noisy = example()
    clean, loud, edge = singular_values(clipped, noisy, "w", not_private=SYNTHETIC)
    assert float(clean[1]) < 1e-4 * float(clean[0])
    assert float(loud[0]) > edge > 0.9 * float(loud[1])


def test_nothing_in_the_library_uses_it() -> None:
    source = Path(__file__).resolve().parents[1] / "src" / "quietgrad"
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "quietgrad.research", path
                assert node.module != "quietgrad" or "research" not in {
                    alias.name for alias in node.names
                }, path
            if isinstance(node, ast.Import):
                assert not any(
                    alias.name.startswith("quietgrad.research") for alias in node.names
                ), path
