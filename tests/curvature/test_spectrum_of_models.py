"""``quietgrad spectrum`` on random features, heads and adapters; and how far the workload believes
its eigenvalues.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.curvature import load_spectrum
from quietgrad.curvature.pretraining import fit_to_labels, made_up_labels
from quietgrad.curvature.spectrum import record_hash
from quietgrad.noise.correlation.curvature import Curvature, curvature_workload
from quietgrad.tensors import trainable_parameters
from quietgrad.training import runner
from quietgrad.training.files.run_dir import open_run_dir
from quietgrad.training.prepare import Prepared, prepare
from quietgrad.training.settings.config import TrainConfig, config_from
from quietgrad.training.settings.noise import check_spectrum, noise_of
from quietgrad.training.spectrum_run import SpectrumRun, make_spectrum, public_images
from quietgrad.training.tasks.images import models as image_models
from quietgrad.training.tasks.images.feature_cache import HeadOnFeatures, embeddings
from quietgrad.training.tasks.images.models import RandomFeatures
from quietgrad.training.tasks.registry import load_task

CPU = torch.device("cpu")
SIZE, WIDTH = 8, 40


def write_stripes(folder: Path, train: int, seed: int, channels: int = 1, size: int = SIZE) -> Path:
    """train/across, train/down and test of the same: noisy stripes."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    row, column = np.indices((size, size))
    for part, count in (("train", train), ("test", 20)):
        for i in range(count):
            pattern = ((row, column)[i % 2] % 4 < 2)[..., None] * 140 + 40
            pixels = (pattern + rng.integers(-30, 31, (size, size, channels))).astype(np.uint8)
            path = folder / part / ("across", "down")[i % 2] / f"{i:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.squeeze()).save(path)
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stripes(tmp_path_factory.mktemp("pictures"), 180, seed=0)


@pytest.fixture(scope="session")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stripes(tmp_path_factory.mktemp("coloured"), 50, seed=1, channels=3, size=12)


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vit")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=4,
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture
def values(pictures: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.name": "features:random",
        "model.tune": "head",
        "model.lora_rank": 2,
        "data.public": True,
        "data.source": str(pictures),
        "data.image_size": SIZE,
        "data.validation_fraction": 0.2,
        "data.public_fraction": 0.3,
        "privacy.target_epsilon": 8.0,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.5,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "training.expected_batch_size": 16,
        "training.steps": 4,
        "training.precision": "float32",
        "training.run_dir": str(tmp_path / "run"),
        "spectrum.output": str(tmp_path / "made" / "spectrum.npz"),
        "spectrum.weights_output": str(tmp_path / "made" / "public.safetensors"),
        "spectrum.simclr_epochs": 1,
        "spectrum.head_epochs": 4,
        "spectrum.top": 6,
        "spectrum.hessian_records": 30,
        "spectrum.probes": 12,
        "spectrum.lanczos_steps": 20,
    }


@pytest.fixture
def few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few enough for a dense Hessian."""
    monkeypatch.setattr(
        image_models, "RandomFeatures", lambda shape, labels: RandomFeatures(shape, labels, WIDTH)
    )


def config_of(values: dict[str, Any]) -> TrainConfig:
    tree: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        table, _, key = name.partition(".")
        tree.setdefault(table, {})[key] = value
    return config_from(tree)


def spectrum_of(values: dict[str, Any]) -> SpectrumRun:
    return make_spectrum(config_of(values), lambda line: None)


def curved(values: dict[str, Any]) -> dict[str, Any]:
    """The same run with noise for the spectrum, from the weights that come with it."""
    weights = values["spectrum.weights_output"]
    started = {"model.weights": weights} if Path(weights).exists() else {}
    return (
        values
        | started
        | {
            "noise.method": "noisecurve",
            "noise.spectrum": values["spectrum.output"],
            "noise.bands": 2,
        }
    )


def train(values: dict[str, Any]) -> tuple[Prepared, runner.Outcome]:
    config = config_of(values)
    prepared = prepare(config)
    return prepared, runner.train(
        prepared, open_run_dir(config.training.run_dir, False), False, lambda progress: None
    )


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in trainable_parameters(model).items()}


def hessian_of_head(head: nn.Linear, features: Tensor, labels: Tensor) -> np.ndarray:
    shape, size = head.weight.shape, head.weight.numel()

    def loss(theta: Tensor) -> Tensor:
        return F.cross_entropy(features @ theta[:size].reshape(shape).T + theta[size:], labels)

    return torch.func.jacrev(torch.func.grad(loss))(
        torch.cat([head.weight.detach().reshape(-1), head.bias.detach()]).double()
    ).numpy()


def test_the_spectrum_of_random_features_is_that_of_the_dense_hessian(
    values: dict, few_features: None
) -> None:
    values["spectrum.probes"] = 150
    made = spectrum_of(values)
    assert made.weights_path is None and not Path(values["spectrum.weights_output"]).exists()
    spectrum = load_spectrum(made.spectrum_path)
    assert spectrum.parameters == {"head.weight": (2, WIDTH), "head.bias": (2,)}

    config = config_of(values)
    public = public_images(config, load_task(config))
    assert (
        30 < len(public) == spectrum.facts["public_images"]
        and spectrum.facts["hessian_images"] == 30
    )
    model = RandomFeatures((1, SIZE, SIZE), 2, WIDTH)
    features = embeddings(model, public, CPU)
    labels = made_up_labels(nn.Identity(), features, 2, "clusters", 0)
    fit_to_labels(HeadOnFeatures(model.head), list(model.head.parameters()), features, labels, 4)
    assert model.head.weight.any() and set(labels) == {0, 1}
    dense = hessian_of_head(model.head, features[:30].double(), torch.from_numpy(labels[:30]))
    exact = np.linalg.eigvalsh(dense)[::-1]
    assert exact[0] > 10 * exact[5] > 0
    np.testing.assert_allclose(spectrum.top, exact[:6], rtol=1e-4, atol=1e-5 * exact[0])
    # All of it is positive: cross entropy of a linear head is convex.
    assert exact[-1] > -1e-9
    facts = spectrum.facts
    assert (
        abs(facts["positive_mass"] - np.trace(dense))
        < 5 * facts["positive_mass_error"]
        < np.trace(dense)
    )
    assert abs(facts["negative_mass"]) < 1e-3 * facts["positive_mass"]
    # On other images it is another one.
    other = hessian_of_head(model.head, features[5:35].double(), torch.from_numpy(labels[5:35]))
    assert np.abs(np.linalg.eigvalsh(other)[::-1][:6] / exact[:6] - 1).max() > 1e-3


def test_a_run_on_random_features_takes_its_noise_from_their_spectrum(values: dict) -> None:
    spectrum_of(values)
    prepared, outcome = train(curved(values))
    assert prepared.plan is not None and "curvature (" in prepared.plan.mixing.workload
    assert outcome.result["epsilon"] <= 8.0 and outcome.result["steps"] == 4
    with pytest.raises(ValueError, match="another parameter set: 'features"):
        prepare(config_of(curved(values) | {"model.name": "cnn:groupnorm", "model.tune": "full"}))


def test_the_spectrum_of_adapters_is_of_what_trains(values: dict, vit: Path) -> None:
    values |= {
        "model.name": f"image:{vit}",
        "model.tune": "lora",
        "spectrum.hessian_records": 12,
        "spectrum.probes": 2,
    }
    made = spectrum_of(values)
    assert (
        made.weights_path == Path(values["spectrum.weights_output"]) and made.weights_path.is_file()
    )
    spectrum = load_spectrum(made.spectrum_path)
    config = config_of(curved(values))
    prepared = prepare(config)
    assert spectrum.parameters == shapes_of(prepared.model.classifier)
    assert sum("lora_" in name for name in spectrum.parameters) == 8
    assert spectrum.top[0] > 0 and (np.diff(spectrum.top) <= 0).all()
    check_spectrum(config.noise, prepared.model.classifier, prepared.task.record_ids)
    # Pretraining has moved the adapters, and the head begins at zero.
    trainable = trainable_parameters(prepared.model.classifier)
    assert (
        any(p.any() for name, p in trainable.items() if "lora_B" in name)
        and not trainable["head.weight"].any()
    )
    _, outcome = train(curved(values))
    assert outcome.result["epsilon"] <= 8.0
    for changes in (
        {"model.lora_rank": 3, "model.weights": ""},
        {"model.tune": "head", "model.weights": ""},
    ):
        with pytest.raises(ValueError, match="another parameter set"):
            prepare(config_of(curved(values) | changes))


def test_the_head_of_a_pretrained_model_needs_no_pretraining(values: dict, vit: Path) -> None:
    values |= {"model.name": f"image:{vit}"}
    made = spectrum_of(values)
    assert made.weights_path is None and not Path(values["spectrum.weights_output"]).exists()
    assert made.spectrum.parameters == {"head.weight": (2, 16), "head.bias": (2,)}
    _, outcome = train(curved(values))
    assert outcome.result["steps"] == 4


def test_the_head_of_our_own_model_gets_a_pretrained_body(values: dict) -> None:
    values |= {"model.name": "cnn:groupnorm"}
    made = spectrum_of(values)
    assert made.spectrum.parameters == {"head.weight": (2, 24), "head.bias": (2,)}
    config = config_of(curved(values) | {"training.seed": 0})
    body = prepare(config).model.classifier.state_dict()
    plain = prepare(config_of(values | {"training.seed": 0})).model.classifier.state_dict()
    assert not body["head.weight"].any() and not torch.equal(
        body["features.0.weight"], plain["features.0.weight"]
    )
    _, outcome = train(curved(values))
    assert outcome.result["steps"] == 4
    # What it was computed for is the head, so the whole model's noise is not shaped by it.
    with pytest.raises(ValueError, match="another parameter set"):
        prepare(config_of(curved(values) | {"model.tune": "full"}))


def test_the_number_of_public_images_can_be_limited(values: dict, few_features: None) -> None:
    config = config_of(values)
    everything = public_images(config, load_task(config))
    chosen = public_images(config_of(values | {"spectrum.public_images": 20}), load_task(config))
    assert len(everything) > 20 == len(chosen)
    # Those with the smallest hashes, whatever else there is.
    assert set(chosen.record_ids) == set(sorted(everything.record_ids)[:20])
    fewer = public_images(config_of(values | {"spectrum.public_images": 10}), load_task(config))
    assert set(fewer.record_ids) < set(chosen.record_ids)
    more = public_images(config_of(values | {"spectrum.public_images": 10_000}), load_task(config))
    assert len(more) == len(everything)
    made = spectrum_of(values | {"spectrum.public_images": 20})
    assert made.spectrum.facts["public_images"] == made.spectrum.facts["hessian_images"] == 20
    assert set(made.spectrum.record_hashes) == {record_hash(i) for i in chosen.record_ids}


def test_coloured_public_images_stand_for_grey_private_ones(
    values: dict, coloured: Path, few_features: None
) -> None:
    values |= {"spectrum.public": str(coloured), "data.public_fraction": 0.0}
    config = config_of(values)
    public = public_images(config, load_task(config))
    assert public.pixels.shape == (50, 1, SIZE, SIZE)
    own = {"data.source": str(coloured), "spectrum.public": "held-out", "data.public_fraction": 0.5}
    theirs = load_task(config_of(values | own)).public
    assert theirs is not None and theirs.pixels.shape[1] == 3
    from PIL import Image

    pictures = [
        Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L") for image in theirs.pixels
    ]
    grey = public.pixels[:, 0].int()
    # Made smaller before or after the colours are mixed: the same but for rounding.
    nearest = [
        (grey - torch.from_numpy(np.array(p)).int()).abs().flatten(1).amax(1).min().item()
        for p in pictures
    ]
    assert nearest and max(nearest) <= 2
    made = spectrum_of(values)
    assert (
        made.spectrum.facts["public"] == str(coloured)
        and made.spectrum.facts["public_images"] == 50
    )
    _, outcome = train(curved(values))
    assert outcome.result["steps"] == 4


def test_grey_public_images_stand_for_coloured_private_ones(
    values: dict, pictures: Path, coloured: Path
) -> None:
    values |= {"data.source": str(coloured), "spectrum.public": str(pictures)}
    config = config_of(values)
    pixels = public_images(config, load_task(config)).pixels
    assert pixels.shape == (180, 3, SIZE, SIZE) and (pixels == pixels[:, :1]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.public_fraction": 0.0},
            "set data.public_fraction above 0, or name a public data set",
        ),
        (
            {"model.name": "packaged:minilm"},
            "model.name='packaged:minilm': spectra are computed for image models",
        ),
        ({"spectrum.public": "nowhere"}, "nowhere"),
    ],
    ids=str,
)
def test_spectra_are_refused_before_any_work(values: dict, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spectrum_of(values | changes)
    assert not Path(values["spectrum.output"]).parent.exists()


def test_private_images_may_not_be_the_public_ones(values: dict, pictures: Path) -> None:
    with pytest.raises(ValueError, match="public images are among the private training records"):
        spectrum_of(values | {"spectrum.public": str(pictures)})


# ------------------------------------------------------------------------------------------------
# what is believed


STEPS, RATE = 12, 0.5
MU = (0.1, 1.0, 1.9, 2.5, 3.5)  # 2 / RATE = 4, 1 / RATE = 2


def workload_of(curvature: Curvature) -> np.ndarray:
    factor = curvature.factor()
    return factor @ factor.T


@pytest.mark.grid(5, "clamps and eigenvalues between the extremes")
@pytest.mark.parametrize("horizon", ["final", "all", "both"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("clamp", [0.3, 1.0, 1.5])
def test_a_clamp_is_that_of_the_eigenvalues(horizon: str, floor: float, clamp: float) -> None:
    found = workload_of(Curvature(MU, RATE, STEPS, floor, horizon, clamp))
    by_hand = tuple(min(mu, clamp / RATE) for mu in MU)
    expected = workload_of(Curvature(by_hand, RATE, STEPS, floor, horizon))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max())
    plain = workload_of(Curvature(MU, RATE, STEPS, floor, horizon))
    assert np.abs(found - plain).max() > 1e-2 * np.abs(plain).max()


def test_at_a_clamp_of_one_sharp_directions_forget_at_once() -> None:
    # mu (1 - eta mu)^k is zero for all but the last step.
    found = workload_of(Curvature((2.5, 3.5), RATE, STEPS, clamp=1.0))
    expected = np.zeros((STEPS, STEPS))
    expected[-1, -1] = 2 * 1 / RATE
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("horizon", ["final", "all", "both"])
def test_without_a_clamp_eigenvalues_count_up_to_the_limit_of_stability(horizon: str) -> None:
    plain = workload_of(Curvature(MU, RATE, STEPS, horizon=horizon))
    np.testing.assert_array_equal(
        plain, workload_of(Curvature(MU, RATE, STEPS, horizon=horizon, clamp=2.0))
    )
    if horizon == "final":
        np.testing.assert_allclose(plain, curvature_workload(MU, RATE, STEPS), rtol=1e-9)
    with pytest.warns(UserWarning, match="1 of 6 eigenvalues exceed 2 / learning_rate = 4 "):
        beyond = Curvature((*MU, 9.0), RATE, STEPS, horizon=horizon)
    np.testing.assert_allclose(
        workload_of(beyond), workload_of(Curvature((*MU, 4.0), RATE, STEPS, horizon=horizon))
    )


@pytest.mark.parametrize("clamp", [0.5, 1.0, 2.0])
def test_small_eigenvalues_are_believed_whatever_the_clamp(clamp: float) -> None:
    small = (0.01, 0.3, 0.9)
    np.testing.assert_array_equal(
        workload_of(Curvature(small, RATE, STEPS, clamp=clamp)),
        workload_of(Curvature(small, RATE, STEPS)),
    )


@pytest.mark.parametrize("clamp", [0.0, -1.0, 2.001, float("nan"), float("inf")])
def test_clamps_out_of_range_are_refused(values: dict, clamp: float) -> None:
    with pytest.raises(ValueError, match=r"clamp=.* must be in \(0, 2\]"):
        Curvature(MU, RATE, STEPS, clamp=clamp)
    with pytest.raises(ValueError, match=r"noise.clamp=.* must be in \(0, 2\]"):
        config_of(curved(values) | {"noise.clamp": clamp})


def test_the_clamp_of_the_configuration_is_the_workloads(values: dict, few_features: None) -> None:
    spectrum_of(values)
    for changes, clamp in (({}, 1.0), ({"noise.clamp": 2.0}, 2.0), ({"noise.clamp": 0.25}, 0.25)):
        config = config_of(curved(values) | changes)
        workload = noise_of(config.noise, config.optimizer, 1.0).workload(STEPS)
        assert isinstance(workload, Curvature) and (workload.clamp, workload.steps) == (
            clamp,
            STEPS,
        )
