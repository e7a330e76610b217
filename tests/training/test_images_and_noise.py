"""Images beside texts, and correlated noise from the configuration to the ledger: spectrum, plan,
train, stop, resume, refusals.
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from idx_images import TRAIN, write_idx
from safetensors.torch import load_file, save_file
from tiny_runs import config_of, crash_at, interrupt_at, train, weights

from quietgrad.accounting import epsilon
from quietgrad.comparing.comparison import run_comparison
from quietgrad.comparing.table import load_comparison
from quietgrad.curvature import load_spectrum
from quietgrad.events import PoissonGaussian, RandomizedClipping
from quietgrad.ledger import read_ledger
from quietgrad.noise import GaussianNoise
from quietgrad.noise.correlation.mixing import load_mixing, mixing_matrix
from quietgrad.noise.correlation.workloads import PrefixSums
from quietgrad.training.prepare import prepare
from quietgrad.training.spectrum_run import make_spectrum


def independent(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != "noise.bands"} | {"noise.method": "independent"}


@pytest.fixture
def values(images: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.name": "cnn:groupnorm",
        "model.tune": "full",
        "data.public": True,
        "data.source": str(images),
        "data.validation_fraction": 0.2,
        "data.public_fraction": 0.2,
        "privacy.target_epsilon": 4.0,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.2,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "noise.method": "banded",
        "noise.bands": 3,
        "training.expected_batch_size": 24,
        "training.steps": 9,
        "training.eval_every": 3,
        "training.checkpoint_every": 2,
        "training.precision": "float32",
        "training.run_dir": str(tmp_path / "run"),
        "spectrum.output": str(tmp_path / "s.npz"),
        "spectrum.weights_output": str(tmp_path / "w.safetensors"),
        "spectrum.simclr_epochs": 1,
        "spectrum.head_epochs": 1,
        "spectrum.top": 6,
        "spectrum.hessian_records": 20,
        "spectrum.probes": 2,
        "spectrum.lanczos_steps": 8,
    }


def test_plan_and_train_with_banded_noise(quietgrad, values, write_config) -> None:
    config, folder = write_config(values), Path(values["training.run_dir"])
    code, out, _ = quietgrad("plan", config, "--json")
    planned = json.loads(out)
    assert code == 0 and planned["bands"] == 3 and planned["compositions"] == 3
    assert (
        planned["objective"] < planned["objective_of_independent_noise"]
        and planned["relative_gap"] < 1e-3
    )
    code, out, err = quietgrad("train", config, "--json")
    result = json.loads(out)
    assert code == 0 and result["epsilon"] == planned["epsilon"] <= 4.0
    said = " ".join(err.replace("│", " ").split())
    assert (
        "cyclic Poisson: 3 parts" in said
        and "correlated over 3 bands" in said
        and "prefix sums" in said
    )
    header = read_ledger(folder).header
    assert header["sampler"] == "cyclic-poisson" and header["record_identity"] == "content"
    assert header["neighbouring"] == "add-remove" and "part_sizes" not in header
    event = PoissonGaussian(result["noise_multiplier"], result["sample_rate"], 9, bands=3)
    assert result["epsilon"] == pytest.approx(epsilon(event, result["delta"]), rel=1e-9)
    code, out, _ = quietgrad("epsilon", "--ledger", folder, "--json")
    assert json.loads(out)["epsilon"] == result["epsilon"]
    assert load_mixing(folder / "mixing.npz").bands == 3
    assert not (folder / "secrets.json").exists()  # nothing secret outlives the run
    assert (folder / "model" / "model.safetensors").is_file()


def test_bands_are_chosen_from_public_facts_and_drawn(values) -> None:
    prepared, _, run_dir = train(
        values | {"noise.bands": "auto", "training.steps": 12, "training.expected_batch_size": 8}
    )
    choice = prepared.plan.band_choice
    assert choice is not None and choice.error_ratio <= 1
    assert choice.chosen.error == min(c.error for c in choice.candidates)
    if choice.chosen.bands > 1:
        assert run_dir.bands_figure.read_bytes().startswith(b"\x89PNG")


def test_plan_draws_the_choice_of_bands_before_anything_runs(
    quietgrad, values, write_config, tmp_path: Path
) -> None:
    figure = tmp_path / "bands.png"
    chosen = values | {"noise.bands": "auto"}
    code, out, err = quietgrad("plan", write_config(chosen), "--figure", figure, "--json")
    assert code == 0, err
    assert json.loads(out)["figure"] == str(figure) and figure.read_bytes().startswith(b"\x89PNG")
    for settings, file, part in (
        (values, figure, "noise.bands=3 leaves none"),
        (independent(values), figure, "noise.method='independent'"),
        (chosen, tmp_path / "bands.pdf", "must end in .png"),
        (chosen, tmp_path / "none" / "bands.png", "no such folder"),
    ):
        code, out, err = quietgrad("plan", write_config(settings), "--figure", file, "--json")
        assert code == 2 and part in err and not out, err


def test_a_choice_of_one_band_is_kept_for_the_resume(
    values, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values | {"noise.bands": "auto"}
    monkeypatch.setattr(
        "quietgrad.noise.correlation.bands.BandCandidate.error",
        property(lambda self: float(self.bands)),
    )
    first, _, run_dir = train(values, report=interrupt_at(4))
    assert first.plan.event.bands == 1 and load_mixing(run_dir.mixing).bands == 1
    monkeypatch.undo()  # found again, the choice would be another
    assert prepare(config_of(values)).plan.event.bands > 1
    resumed, outcome, _ = train(values, resume=True)
    assert resumed.plan.event == first.plan.event and outcome.result["steps"] == 9


def test_a_matrix_of_a_start_that_released_nothing_is_not_kept(values) -> None:
    folder = Path(values["training.run_dir"])
    train(values, report=interrupt_at(1))
    for name in ("ledger.jsonl", "ledger.jsonl.count", "secrets.json", "checkpoint.pt"):
        (folder / name).unlink()
    train(values | {"noise.bands": 2}, report=interrupt_at(1))
    assert load_mixing(folder / "mixing.npz").bands == 2


def test_a_comparison_makes_a_matrix_for_every_setting_that_shapes_it(
    values, tmp_path: Path
) -> None:
    base = {
        name: value
        for name, value in values.items()
        if not name.startswith(("privacy.", "training.run_dir"))
    }
    lines = [
        "[comparison]",
        "epsilons = [4.0]",
        "seeds = 1",
        "tuning_seeds = 1",
        "learning_rates = [0.2]",
    ]
    lines += [
        "protocol_rate = 0.2",
        'reference = "short"',
        "[variants.short]",
        "training.steps = 6",
        "[variants.long]",
    ]
    lines += ["training.steps = 9"]
    tables: dict[str, list[str]] = {}
    for name, value in base.items():
        table, key = name.split(".")
        tables.setdefault(table, []).append(f"{key} = {json.dumps(value)}")
    for table, keys in tables.items():
        lines += [f"[{table}]", *keys]
    file = tmp_path / "comparison.toml"
    file.write_text("\n".join(lines) + "\n")
    made: list[int] = []
    run_comparison(load_comparison(file), lambda run, record, left: made.append(record["steps"]))
    assert sorted(made) == [6, 9]


def test_the_sketches_that_plan_offers_are_calibrated_for_the_same_bands(
    quietgrad, values, write_config
) -> None:
    code, out, _ = quietgrad("plan", write_config(values), "--json")
    assert code == 0
    for offered in json.loads(out)["sketches"]:
        asked = {
            "clipping.estimator": offered["estimator"],
            "clipping.sketch_dim": offered["sketch_dim"],
        }
        plan = prepare(config_of(values | asked)).plan
        assert offered["noise_multiplier"] == plan.noise_multiplier


@pytest.mark.grid(2, "mechanisms that share the resume")
@pytest.mark.parametrize("memory", ["rows", "regenerate"])
@pytest.mark.parametrize("stop", [1, 5])
def test_a_seeded_run_goes_on_exactly_where_it_was(values, memory: str, stop: int) -> None:
    values = values | {"training.seed": 3, "data.public": True, "noise.memory": memory}
    whole, _, _ = train(values | {"training.run_dir": values["training.run_dir"] + "-whole"})
    train(values, report=interrupt_at(stop))
    resumed, _, run_dir = train(values, resume=True)
    assert read_ledger(run_dir.path).releases == 9
    expected = weights(whole)
    for name, p in weights(resumed).items():
        torch.testing.assert_close(p, expected[name], rtol=0, atol=1e-6)


def test_without_a_seed_the_keys_are_kept_secret_until_the_end_and_one_block_goes_on(
    values,
) -> None:
    with pytest.raises(OSError, match="went away"):
        train(values, report=crash_at(5))
    folder = Path(values["training.run_dir"])
    keys = folder / "secrets.json"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert read_ledger(folder).noise_block == (0, prepare_noise(values).digest)
    roots = [session["root"] for session in json.loads(keys.read_text())["sessions"]]
    for name in ("ledger.jsonl", "config.toml", "environment.json", "metrics.jsonl"):
        text = (folder / name).read_text() if (folder / name).exists() else ""
        assert not any(root in text for root in roots)
    train(values, resume=True)
    assert read_ledger(folder).noise_block[0] == 0  # the same block to the end
    assert not keys.exists()


def prepare_noise(values: dict[str, Any]) -> GaussianNoise:
    return prepare(config_of(values)).plan.noise


def test_with_lost_keys_a_new_block_begins(values) -> None:
    train(values, report=interrupt_at(4))
    folder = Path(values["training.run_dir"])
    (folder / "secrets.json").unlink()
    _, outcome, _ = train(values, resume=True)
    assert read_ledger(folder).noise_block[0] == 4
    assert outcome.result["epsilon"] <= 4.0 and read_ledger(folder).releases == 9


def test_no_session_draws_with_the_root_of_another(values) -> None:
    folder = Path(values["training.run_dir"])
    train(values, report=interrupt_at(4))
    first = json.loads((folder / "secrets.json").read_text())["sessions"]
    train(values, resume=True, report=interrupt_at(6))
    second = json.loads((folder / "secrets.json").read_text())["sessions"]
    assert stat.S_IMODE((folder / "secrets.json.rows").stat().st_mode) == 0o600
    train(values, resume=True)
    assert not list(folder.glob("secrets*"))
    assert [x["step"] for x in first] == [0] and [x["step"] for x in second] == [0, 4]
    assert second[0] == first[0] and second[1]["root"] != first[0]["root"]


def test_the_three_methods_compose(values) -> None:
    plain = prepare(config_of(values)).plan
    folder = values["training.run_dir"]
    denoised, _, _ = train(
        values
        | {"denoising.method": "persistent", "denoising.delay": 2, "optimizer.momentum": 0.9}
        | {"training.run_dir": folder + "-denoised"}
    )
    assert (denoised.plan.event, denoised.plan.epsilon) == (
        plain.event,
        plain.epsilon,
    )  # post-processing is free
    sketched, _, run_dir = train(
        values | {"clipping.estimator": "hutch", "training.run_dir": folder + "-sketched"}
    )
    event = sketched.plan.event
    assert isinstance(event.clipping, RandomizedClipping) and event.bands == 3
    assert event.noise_multiplier > plain.noise_multiplier  # sketches cost noise
    assert read_ledger(run_dir.path).event == event and sketched.plan.epsilon <= 4.0
    exact = PoissonGaussian(event.noise_multiplier, event.sample_rate, event.steps, bands=3)
    assert epsilon(exact, sketched.plan.delta) < sketched.plan.epsilon


def test_spectrum_then_noisecurve(quietgrad, values, write_config, tmp_path: Path) -> None:
    code, out, _ = quietgrad("spectrum", write_config(values), "--json")
    record = json.loads(out)
    assert code == 0 and len(record["top"]) == 6 and record["parameters"] > 29_000
    spectrum = load_spectrum(values["spectrum.output"])
    assert record["tail_index"] == spectrum.tail_index >= 7
    assert Path(record["figure"]).read_bytes().startswith(b"\x89PNG")
    curved = values | {
        "noise.method": "noisecurve",
        "noise.spectrum": values["spectrum.output"],
        "model.weights": values["spectrum.weights_output"],
    }
    prepared, outcome, _ = train(curved)
    assert "curvature" in prepared.plan.mixing.workload and outcome.result["epsilon"] <= 4.0
    # The head alone is another parameter set; other public weights would be another model.
    with pytest.raises(ValueError, match="another parameter set"):
        prepare(config_of(curved | {"model.tune": "head"}))
    # With nothing set aside, the images that the spectrum saw are private now.
    with pytest.raises(ValueError, match="among the private training records"):
        prepare(config_of(curved | {"data.public_fraction": 0.0, "model.weights": ""}))
    with pytest.warns(UserWarning, match="plain SGD"):
        prepare(config_of(curved | {"optimizer.name": "adamw", "optimizer.learning_rate": 1e-3}))
    curvature = curved | {"noise.curvature_factor": 1.0, "optimizer.learning_rate": 1e4}
    with pytest.warns(UserWarning, match="eigenvalues exceed"):
        prepare(config_of(curvature))


def test_weights_know_the_images_that_they_are_from(values, tmp_path: Path) -> None:
    """Whatever the noise: no epsilon accounts for what was fitted to private images before."""
    made = make_spectrum(config_of(values), lambda line: None)
    weights = {"model.weights": str(made.weights_path)}
    for noisy in (values, independent(values)):
        prepare(config_of(noisy | weights))
        for changed in ({"data.public_fraction": 0.0}, {"data.public_fraction": 0.1}):
            with pytest.raises(
                ValueError,
                match=r"model.weights='.*' were trained without privacy on private training",
            ):
                prepare(config_of(noisy | weights | changed))
        with pytest.raises(
            ValueError, match=r"of the form \[1, 8, 8\], the private ones have \[1, 6, 6\]"
        ):
            prepare(config_of(noisy | weights | {"data.image_size": 6}))
    # Weights of other origin say nothing of their data, and a header that was tampered with is no
    # reason to believe them.
    tensors = load_file(str(made.weights_path))
    plain, odd = tmp_path / "plain.safetensors", tmp_path / "odd.safetensors"
    save_file(tensors, str(plain))
    save_file(tensors, str(odd), {"quietgrad": "{}"})
    prepare(config_of(values | {"model.weights": str(plain), "data.public_fraction": 0.0}))
    with pytest.raises(ValueError, match="does not say which images it is from"):
        prepare(config_of(values | {"model.weights": str(odd)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise.clamp": 1.5}, "noise.clamp=1.5 is no key of noise.method='banded', whose keys "
         "are bands, family, memory and source; it belongs to 'noisecurve'"),
        ({"noise.method": "independent"}, "noise.bands=3 is no key of noise.method='independent', "
         "whose keys are source; it belongs to 'banded' or 'noisecurve'"),
        ({"noise.bandz": 2}, "unknown key noise.bandz; did you mean 'bands'"),
        ({"noise.workload": "prefix"}, "unknown key noise.workload"),  # for Python alone
        ({"optimizer.name": "adamw", "optimizer.momentum": 0.9}, "optimizer.momentum=0.9 is no key "
         "of optimizer.name='adamw'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_key_of_another_method_is_refused(values, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(values | changes)


def test_plan_says_what_does_not_act_and_compares_at_the_same_epsilon(
    quietgrad, values, write_config
) -> None:
    code, out, err = quietgrad("plan", write_config(values | {"privacy.enabled": False}), "--json")
    said = " ".join(err.split())
    assert code == 0 and said.count("is without effect") == 1
    assert "noise.method='banded' is without effect: privacy.enabled=false adds no noise" in said
    code, out, err = quietgrad("plan", write_config(values), "--json")
    assert code == 0 and "is without effect" not in err
    planned = json.loads(out)
    plain = prepare(config_of(independent(values))).plan
    expected = (planned["noise_multiplier"] / plain.noise_multiplier) ** 2
    expected *= planned["objective"] / planned["objective_of_independent_noise"]
    assert planned["predicted_error_ratio"] == pytest.approx(expected)
    late = {"denoising.method": "amplify", "training.steps": 8}
    code, _, err = quietgrad("plan", write_config(values | late))
    assert code == 0 and "leaves the first 8 steps as they are, and there are 8" in " ".join(
        err.split()
    )
    code, _, err = quietgrad(
        "plan", write_config(values | {"denoising.method": "persistent", "training.steps": 9})
    )
    assert code == 0 and "without effect" not in err


def test_banded_noise_follows_the_schedule(values) -> None:
    constant = prepare(config_of(values)).plan.mixing
    falling = prepare(
        config_of(values | {"optimizer.schedule": "linear", "optimizer.warmup_steps": 2})
    ).plan.mixing
    rates = tuple((1.0, 2.0, *[3.0] * 7)[t] / 3 * (1 - 0.95 * t / 9) for t in range(9))
    expected = mixing_matrix(PrefixSums(9, 0.0, rates), 3)
    assert falling.objective == pytest.approx(expected.objective, rel=1e-9)
    np.testing.assert_allclose(falling.banded.columns, expected.banded.columns, atol=1e-6)
    assert np.abs(falling.banded.columns - constant.banded.columns).max() > 0.01
    alike = {"optimizer.schedule": "linear", "noise.family": "toeplitz"}
    assert prepare(config_of(values | alike)).plan.mixing.workload == "prefix sums"


def test_public_data_may_not_be_the_private_ones(values, images: Path) -> None:
    with pytest.raises(ValueError, match="public images are among the private"):
        make_spectrum(config_of(values | {"spectrum.public": str(images)}), lambda line: None)
    other = write_idx(Path(values["training.run_dir"] + "-other"), compressed=False, seed=7)
    made = make_spectrum(config_of(values | {"spectrum.public": str(other)}), lambda line: None)
    assert made.spectrum.facts["public_images"] == TRAIN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise.method": "curvy"}, "noise.method='curvy'"),
        ({"noise.method": "noisecurve"}, "noise.spectrum is missing"),
        ({"noise.method": "noisecurve", "noise.spectrum": "gone.npz"}, "no such file"),
        ({"noise.bands": 10}, "bands=10 exceeds steps=9"),
        ({"noise.bands": -1}, "noise.bands"),
        ({"noise.family": "wide"}, "noise.family='wide'"),
        ({"noise.memory": "none"}, "noise.memory='none'"),
        ({"optimizer.schedule": "cosine"}, "optimizer.schedule='cosine'"),
        ({"model.name": "packaged:minilm"}, "holds images"),
        ({"model.tune": "lora"}, "use 'full' or 'head'"),
        ({"model.weights": "gone.safetensors"}, "no such file"),
        ({"data.validation_fraction": 0.9}, "leave no training records"),
        (
            {
                "noise.bands": "auto",
                "privacy.target_epsilon": None,
                "privacy.noise_multiplier": 1.0,
            },
            "bands='auto'",
        ),
    ],
)
def test_bad_configurations_are_refused_before_any_work(
    values, changes: dict[str, Any], message: str
) -> None:
    chosen = {name: value for name, value in (values | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        prepare(config_of(chosen))
    assert not Path(values["training.run_dir"]).exists()


def test_a_resume_may_not_change_the_noise(quietgrad, values, write_config) -> None:
    train(values, report=interrupt_at(2))
    config = write_config(values | {"noise.bands": 2})
    code, _, err = quietgrad("train", config, "--resume")
    assert code != 0 and "noise.bands was 3 and is now 2" in " ".join(err.split())
