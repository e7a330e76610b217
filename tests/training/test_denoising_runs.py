"""Denoising inside ``train``: no effect on privacy, on the ledger or on resumes; an effect on the weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_runs import config_of, interrupt_at, train, weights

from quietgrad import PrivacyConfig
from quietgrad.denoising import SpectralDenoiser
from quietgrad.training.config import load_saved_config, require_same_settings
from quietgrad.training.optimizers import build_denoiser

VARIANTS = {
    "none": {},
    "paper": {"denoising.method": "paper"},
    "gradient": {"denoising.method": "spectral", "denoising.target": "gradient"},
    "momentum": {"denoising.method": "spectral", "denoising.target": "momentum", "denoising.delay": 2},
}
# Little noise, so that much stands out of it.
LOUD = {"privacy.noise_multiplier": 0.3, "training.seed": 5, "model.tune": "full"}


def run(settings: dict, variant: str, folder: str, **kwargs: object):
    values = settings | LOUD | VARIANTS[variant] | {"training.run_dir": settings["training.run_dir"] + folder}
    values.pop("privacy.target_epsilon")
    return train(values, **kwargs)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_epsilon_and_ledger_are_identical_and_weights_are_not(settings: dict, optimizer: str) -> None:
    settings = settings | {"optimizer.name": optimizer, "optimizer.momentum": 0.9}
    runs = {variant: run(settings, variant, f"-{variant}") for variant in VARIANTS}
    ledgers = {variant: (Path(r[2].path) / "ledger.jsonl").read_bytes() for variant, r in runs.items()}
    results = {variant: r[1].result for variant, r in runs.items()}
    for variant in VARIANTS:
        assert ledgers[variant] == ledgers["none"]
        assert results[variant]["epsilon"] == results["none"]["epsilon"]
        assert results[variant]["noise_multiplier"] == results["none"]["noise_multiplier"]
    found = {variant: torch.cat([w.flatten() for w in weights(r[0]).values()]) for variant, r in runs.items()}
    for variant in ("paper", "gradient", "momentum"):
        assert not torch.equal(found[variant], found["none"]), variant


@pytest.mark.parametrize("variant", ["paper", "momentum"])
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
        "train", write_config(settings | {"training.steps": 8}), "--resume", "--set", "denoising.method=paper"
    )
    assert code == 2 and "denoising.method" in err


def test_the_plan_denoises_what_it_writes() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(90, 60)
    batch = (torch.randn(40, 90), torch.randn(40, 60))

    def loss(network: torch.nn.Module, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (network(rows[0]) - rows[1]).square().sum(1)

    def step(denoiser: SpectralDenoiser | None) -> tuple[torch.Tensor, torch.Tensor, float]:
        plan = PrivacyConfig(noise_multiplier=0.02, sample_rate=1.0, steps=1, denoiser=denoiser, seed=1).build(40)
        with plan.start() as private:
            for _ in private.batches():
                noisy = private.step(model, loss, batch)
        assert model.weight.grad is not None
        return model.weight.grad.clone(), noisy.mean(40.0)["weight"], plan.epsilon

    plain, released, spent = step(None)
    denoised, same, also_spent = step(SpectralDenoiser(target="gradient"))
    assert torch.equal(plain, released) and torch.equal(released, same) and spent == also_spent
    assert not torch.equal(denoised, plain)
    with pytest.raises(ValueError, match="acts inside the optimiser"):
        step(SpectralDenoiser(target="momentum"))


def test_configurations() -> None:
    assert build_denoiser(config_of({}).denoising) is None
    assert build_denoiser(config_of({"denoising.method": "paper"}).denoising) == SpectralDenoiser.paper()
    found = build_denoiser(config_of({"denoising.method": "spectral", "denoising.kappa": 1.1}).denoising)
    assert found == SpectralDenoiser(kappa=1.1, target="momentum")
    for gain, expected in ((0, None), (1, 1.0), (4.0, 4.0)):
        found = build_denoiser(config_of({"denoising.method": "spectral", "denoising.amplify": float(gain)}).denoising)
        assert found == SpectralDenoiser(target="momentum", amplify=expected)
    for name, value in (
        ("method", "magic"),
        ("target", "weights"),
        ("kappa", 0.5),
        ("amplify", 0.5),
        ("amplify", math.inf),
        ("delay", -2),
    ):
        with pytest.raises(ValueError, match=f"denoising.{name}={value!r}"):
            config_of({f"denoising.{name}": value})
    found = build_denoiser(config_of({"denoising.method": "spectral", "denoising.delay": 3}).denoising)
    assert found == SpectralDenoiser(target="momentum", delay=3)
    with pytest.raises(ValueError, match=r"denoising\.delay=3 is for denoising\.target='momentum'"):
        config_of({"denoising.method": "spectral", "denoising.delay": 3, "denoising.target": "gradient"})
    with pytest.raises(ValueError, match="train_layers"):
        config_of({"model.train_layers": 1, "model.tune": "lora"})


def test_a_run_that_is_older_than_a_setting_resumes_as_it_began(settings: dict, tmp_path: Path) -> None:
    now = config_of(settings | {"denoising.method": "spectral"})
    saved = tmp_path / "config.toml"
    added = ("amplify", "delay", "persistence")
    saved.write_text("\n".join(line for line in now.to_toml().splitlines() if not line.startswith(added)))
    before = load_saved_config(saved)
    assert before.denoising.amplify == 1.0 and before.denoising.delay == 0
    with pytest.raises(ValueError, match=r"denoising\.amplify was 1\.0 and is now 0\.0"):
        require_same_settings(before, now)
    saved.write_text("\n".join(line for line in now.to_toml().splitlines() if not line.startswith("persistence")))
    assert build_denoiser(load_saved_config(saved).denoising) == SpectralDenoiser(target="momentum", persistence=False)
    with pytest.raises(ValueError, match=r"denoising\.persistence was False and is now True"):
        require_same_settings(load_saved_config(saved), now)
    for other in ({"denoising.target": "gradient"}, {"denoising.amplify": 1.0}):  # nothing persists: nothing differs
        same = config_of(settings | {"denoising.method": "spectral"} | other)
        saved.write_text("\n".join(line for line in same.to_toml().splitlines() if not line.startswith("persistence")))
        require_same_settings(load_saved_config(saved), same)
    saved.write_text(now.to_toml())
    assert load_saved_config(saved) == now
    plain = config_of(settings)  # what a run does not read is no reason to refuse it
    saved.write_text("\n".join(line for line in plain.to_toml().splitlines() if not line.startswith("amplify")))
    require_same_settings(load_saved_config(saved), plain)


def test_only_the_top_layers_train(settings: dict) -> None:
    prepared, _, _ = train(settings | {"model.tune": "full", "model.train_layers": 1})
    trainable = {
        n.split(".")[3] for n, p in prepared.model.classifier.named_parameters() if p.requires_grad and "layer" in n
    }
    assert trainable == {"1"}
    assert not any(p.requires_grad for p in prepared.model.classifier.encoder.embeddings.parameters())
    with pytest.raises(ValueError, match=r"train_layers=3 .* has 2 layers"):
        train(
            settings
            | {"model.tune": "full", "model.train_layers": 3, "training.run_dir": settings["training.run_dir"] + "3"}
        )


def test_nothing_of_the_denoiser_is_logged(settings: dict) -> None:
    _, _, run_dir = run(settings, "momentum", "-logged")
    text = (Path(run_dir.path) / "metrics.jsonl").read_text() + json.dumps(json.loads(run_dir.result.read_text()))
    assert not any(word in text for word in ("improvement", "spike", "singular", "cosine"))
