"""Denoising inside ``train``: no effect on privacy, on the ledger or on resumes; an effect on the
weights.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_runs import config_of, interrupt_at, train, weights

from quietgrad import PrivacyConfig
from quietgrad.denoising import (
    ConstantAmplification,
    GradientRule,
    OnMomentum,
    PersistentAmplification,
    PublishedShrinkage,
    SpikesWithBulk,
)
from quietgrad.training.settings.config import load_config
from quietgrad.training.settings.denoising import BulkOnMomentum
from quietgrad.training.settings.resume import require_same_settings

VARIANTS = {
    "none": {},
    "published": {"denoising.method": "published"},
    "bulk": {"denoising.method": "bulk"},
    "amplify": {"denoising.method": "amplify", "denoising.delay": 2},
    "persistent": {"denoising.method": "persistent", "denoising.delay": 2},
    "bulk-on-momentum": {"denoising.method": "bulk-on-momentum"},
}
# Little noise, so that much stands out of it.
LOUD = {"privacy.noise_multiplier": 0.3, "training.seed": 5, "model.tune": "full"}


def run(settings: dict, variant: str, folder: str, **kwargs: object):
    values = (
        settings
        | LOUD
        | VARIANTS[variant]
        | {"training.run_dir": settings["training.run_dir"] + folder}
    )
    values.pop("privacy.target_epsilon")
    return train(values, **kwargs)


@pytest.mark.grid(1, "two optimisers, of which the rules know nothing")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_epsilon_and_ledger_are_identical_and_weights_are_not(
    settings: dict, optimizer: str
) -> None:
    momentum = {"optimizer.momentum": 0.9} if optimizer == "sgd" else {}
    settings = settings | {"optimizer.name": optimizer} | momentum
    runs = {variant: run(settings, variant, f"-{variant}") for variant in VARIANTS}
    ledgers = {
        variant: (Path(r[2].path) / "ledger.jsonl").read_bytes() for variant, r in runs.items()
    }
    results = {variant: r[1].result for variant, r in runs.items()}
    for variant in VARIANTS:
        assert ledgers[variant] == ledgers["none"]
        assert results[variant]["epsilon"] == results["none"]["epsilon"]
        assert results[variant]["noise_multiplier"] == results["none"]["noise_multiplier"]
    found = {
        variant: torch.cat([w.flatten() for w in weights(r[0]).values()])
        for variant, r in runs.items()
    }
    for variant in set(VARIANTS) - {"none"}:
        assert not torch.equal(found[variant], found["none"]), variant


@pytest.mark.grid(1, "two rules that share the resume")
@pytest.mark.parametrize("variant", ["published", "persistent"])
def test_interrupted_and_resumed_equals_uninterrupted(settings: dict, variant: str) -> None:
    whole, _, _ = run(settings, variant, "-whole")
    _, first, _ = run(settings, variant, "-parts", report=interrupt_at(3))
    assert first.interrupted
    prepared, second, _ = run(settings, variant, "-parts", resume=True)
    assert not second.interrupted
    expected = weights(whole)
    assert all(torch.equal(p, expected[name]) for name, p in weights(prepared).items())


def test_a_resume_with_another_denoiser_is_refused(quietgrad, settings, write_config) -> None:
    code, _, err = quietgrad("train", write_config(settings), "--json")
    assert code == 0, err
    code, _, err = quietgrad(
        "train",
        write_config(settings | {"training.steps": 8}),
        "--resume",
        "--set",
        "denoising.method=published",
    )
    assert code == 2 and "denoising.method" in err


def test_the_plan_denoises_what_it_writes() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(90, 60)
    batch = (torch.randn(40, 90), torch.randn(40, 60))

    def loss(network: torch.nn.Module, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (network(rows[0]) - rows[1]).square().sum(1)

    def step(denoiser: GradientRule | None) -> tuple[torch.Tensor, torch.Tensor, float]:
        config = PrivacyConfig(
            noise_multiplier=0.02,
            sample_rate=1.0,
            steps=1,
            denoising=denoiser,
            seed=1,
            data_are_public=True,
        )
        plan = config.build(40)
        with plan.start() as private:
            for _ in private.batches():
                noisy = private.step(model, loss, batch)
        assert model.weight.grad is not None
        return model.weight.grad.clone(), noisy.mean()["weight"], plan.epsilon

    plain, released, spent = step(None)
    denoised, same, also_spent = step(SpikesWithBulk())
    assert torch.equal(plain, released) and torch.equal(released, same) and spent == also_spent
    assert not torch.equal(denoised, plain)
    with pytest.raises(TypeError, match="acts inside the optimiser"):
        step(PersistentAmplification())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "of_gradient", "of_momentum"),
    [
        ({}, None, None),
        ({"method": "published"}, PublishedShrinkage(), None),
        (
            {"method": "published", "norm_correction": False},
            PublishedShrinkage(norm_correction=False),
            None,
        ),
        ({"method": "bulk", "keep_bulk": 0.2, "kappa": 1.1}, SpikesWithBulk(1.1, 0.2), None),
        ({"method": "amplify"}, None, ConstantAmplification()),
        (
            {"method": "amplify", "gain": 4, "delay": 0},
            None,
            ConstantAmplification(gain=4.0, delay=0),
        ),
        (
            {"method": "persistent", "embeddings": True},
            None,
            PersistentAmplification(embeddings=True),
        ),
        (
            {"method": "persistent", "largest_gain": 4.0},
            None,
            PersistentAmplification(largest_gain=4.0),
        ),
        ({"method": "bulk-on-momentum", "delay": 3}, None, BulkOnMomentum(delay=3)),
    ],
    ids=str,
)
def test_the_method_picks_the_rule(
    settings: dict, of_gradient: object, of_momentum: object
) -> None:
    config = config_of({f"denoising.{name}": value for name, value in settings.items()})
    assert (config.gradient_rule, config.momentum_rule) == (of_gradient, of_momentum)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "denoising.method='magic' is unknown"),
        ({"method": "spectral"}, "denoising.method='spectral' is unknown"),
        ({"kappa": 1.1}, "denoising.kappa=1.1 is no key of denoising.method='none'"),
        (
            {"method": "published", "gain": 2.0},
            "denoising.gain=2.0 is no key of denoising.method='published'",
        ),
        (
            {"method": "published", "delay": 0},
            "denoising.delay=0 is no key .* keys are kappa, norm_correction",
        ),
        ({"method": "bulk", "norm_correction": False}, "denoising.norm_correction=False is no key"),
        ({"method": "amplify", "largest_gain": 2.0}, "denoising.largest_gain=2.0 is no key"),
        ({"method": "persistent", "gain": 2.0}, "denoising.gain=2.0 is no key"),
        ({"method": "persistent", "keep_bulk": 0.5}, "denoising.keep_bulk=0.5 is no key"),
        ({"method": "persistent", "target": "momentum"}, "unknown key denoising.target"),
        ({"method": "bulk", "kappa": 0.5}, "denoising.kappa=0.5"),
        ({"method": "bulk", "keep_bulk": 0.0}, "denoising.keep_bulk=0.0"),
        ({"method": "bulk-on-momentum", "keep_bulk": 1.0}, "denoising.keep_bulk=1.0"),
        ({"method": "amplify", "gain": 0.5}, "denoising.gain=0.5"),
        ({"method": "amplify", "gain": math.inf}, "denoising.gain=inf"),
        ({"method": "amplify", "delay": -2}, "denoising.delay=-2"),
        ({"method": "amplify", "delay": 2.5}, "denoising.delay=2.5 must be a whole number"),
        ({"method": "persistent", "largest_gain": 0.5}, "denoising.largest_gain=0.5"),
    ],
    ids=str,
)
def test_a_key_of_another_method_and_a_value_out_of_range_are_refused(
    settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of({f"denoising.{name}": value for name, value in settings.items()})


def test_bulk_on_momentum_is_the_rule_within_a_rule() -> None:
    table = BulkOnMomentum(1.1, 0.4, 3, True)
    assert table.rule == OnMomentum(SpikesWithBulk(1.1, 0.4, True), 3)


def test_defaults_are_written_down(settings: dict, tmp_path: Path) -> None:
    """A resume goes on with what the rule's defaults were, and saying them is no change."""
    now = config_of(settings | {"denoising.method": "amplify"})
    assert now.to_dict()["denoising"] == {
        "method": "amplify", "kappa": 1.02, "gain": 2.0, "delay": 8, "embeddings": False
    }  # fmt: skip
    saved = tmp_path / "config.toml"
    saved.write_text(now.to_toml())
    assert load_config(saved) == now
    require_same_settings(
        now, config_of(settings | {"denoising.method": "amplify", "denoising.gain": 2.0})
    )
    with pytest.raises(ValueError, match=r"denoising\.gain was 2\.0 and is now 3\.0"):
        require_same_settings(
            now, config_of(settings | {"denoising.method": "amplify", "denoising.gain": 3.0})
        )


def test_frozen_layers_must_be_left() -> None:
    with pytest.raises(ValueError, match="train_layers"):
        config_of({"model.train_layers": 1, "model.tune": "lora"})


def test_only_the_top_layers_train(settings: dict) -> None:
    prepared, _, _ = train(settings | {"model.tune": "full", "model.train_layers": 1})
    trainable = {
        n.split(".")[3]
        for n, p in prepared.model.classifier.named_parameters()
        if p.requires_grad and "layer" in n
    }
    assert trainable == {"1"}
    assert not any(
        p.requires_grad for p in prepared.model.classifier.encoder.embeddings.parameters()
    )
    with pytest.raises(ValueError, match=r"train_layers=3 .* has 2 layers"):
        train(
            settings
            | {
                "model.tune": "full",
                "model.train_layers": 3,
                "training.run_dir": settings["training.run_dir"] + "3",
            }
        )


def test_nothing_of_the_denoiser_is_logged(settings: dict) -> None:
    _, _, run_dir = run(settings, "persistent", "-logged")
    text = (Path(run_dir.path) / "metrics.jsonl").read_text() + json.dumps(
        json.loads(run_dir.result.read_text())
    )
    assert not any(word in text for word in ("improvement", "spike", "singular", "cosine"))
