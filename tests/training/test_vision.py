"""Models of torchvision. What needs torchvision is left out without it: no release of it goes with
the torch of the lock.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_model_cases import CPU, MEAN, STD, noise, off_zero
from safetensors.torch import save_file
from tiny_runs import config_of, train
from torch import nn

from quietgrad.clipping.verify import verify_clipping
from quietgrad.training.files.provenance import EPSILONS_ADD, read_provenance
from quietgrad.training.prepare import prepare, verify_on_public_records
from quietgrad.training.settings.config import load_config
from quietgrad.training.sources import hub
from quietgrad.training.sources.hub import require_model
from quietgrad.training.tasks.images.models import is_image_model, load_image_classifier
from quietgrad.training.tasks.images.vision import VisionClassifier, write_vision
from quietgrad.training.tasks.loaded import Tuning
from quietgrad.training.tasks.records import classification_loss
from quietgrad.training.tasks.registry import kind_of

RESNET, SMALLEST = "torchvision:resnet18", "torchvision:shufflenet_v2_x0_5"


@pytest.fixture
def vision() -> Any:
    return pytest.importorskip("torchvision")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder of torch's weights, and no way to fetch more."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(hub, "reachable", lambda endpoint: False)
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    yield folder


def installed(monkeypatch: pytest.MonkeyPatch, package: Path | None) -> None:
    """A torchvision that says where its weights are, or none."""
    found = None
    if package is not None:
        (package / "models").mkdir()
        (package / "models" / "resnet.py").write_text(
            '# https://docs.example\nurl="https://weights.example/r.pth"'
        )
        found = SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr(hub, "importlib", SimpleNamespace(util=SimpleNamespace(
        find_spec=lambda name: found)))  # fmt: skip


@pytest.fixture
def smallest_file(vision: Any, tmp_path: Path) -> Path:
    """torchvision's state dict of a thousand classes, with statistics of some other images."""
    torch.manual_seed(0)
    model = vision.models.shufflenet_v2_x0_5().train()
    with torch.no_grad():
        model(torch.randn(8, 3, 64, 64) + 0.3)
    file = tmp_path / "begin.safetensors"
    save_file(model.state_dict(), str(file))
    return file


# ------------------------------------------------------------------------------------------------
# without torchvision


def test_names_of_torchvision_are_of_images() -> None:
    assert is_image_model(RESNET) and not is_image_model("resnet18")


def test_torchvision_is_asked_for_before_any_work(
    values: dict[str, Any], write_config: Any, quietgrad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, None)
    values |= {"model.name": RESNET, "model.tune": "head", "model.weights": "some.safetensors"}
    code, _, err = quietgrad("train", write_config(values))
    assert code == 2 and len(err.strip().splitlines()) == 1
    assert f"model.name='{RESNET}' needs torchvision" in err
    assert "pip install 'quietgrad[torchvision]'" in err
    assert not Path(values["training.run_dir"]).exists()
    with pytest.raises(ValueError, match="needs torchvision"):
        prepare(config_of(values))


def test_a_torchvision_of_another_torch_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as where its operators are missing
    with pytest.raises(ValueError, match="needs torchvision, in the build that goes with torch: "):
        load_image_classifier(RESNET, (3, 8, 8), 2, Tuning("head"), "some.safetensors")


def test_weights_that_cannot_be_had_are_refused(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, tmp_path)
    (kept / "resnet50-11ad3fa6.pth").touch()
    wanted = r"not in .* weights\.example cannot be reached; put .* or name a safetensors file"
    with pytest.raises(ValueError, match=wanted) as refused:
        require_model("model.name", RESNET)
    assert "\n" not in str(refused.value) and str(kept) in str(refused.value)
    require_model("model.name", RESNET, "some.safetensors")
    (kept / "resnet18-f37072fd.pth").touch()
    require_model("model.name", RESNET)


def test_adapters_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"does not fit .*; use 'full' or 'head'"):
        load_image_classifier(RESNET, (3, 8, 8), 2, Tuning("lora"))


# ------------------------------------------------------------------------------------------------
# with it


def test_the_file_of_every_model_is_found(vision: Any, kept: Path) -> None:
    names = vision.models.list_models(module=vision.models)
    assert len(names) > 70
    for name in names:
        with pytest.raises(ValueError, match="its weights are not in"):
            require_model("model.name", f"torchvision:{name}")
        url = vision.models.get_model_weights(name).DEFAULT.url
        file = kept / url.rpartition("/")[2]
        file.touch()
        require_model("model.name", f"torchvision:{name}")
        file.unlink()


@pytest.mark.parametrize(
    ("name", "tune", "message"),
    [
        ("resnet19", "head", "no such classifier; did you mean 'resnet18'"),
        ("fasterrcnn_resnet50_fpn", "head", "no such classifier"),
        ("resnet18", "full", r"batch normalisation \('bn1'\) mixes .*: vit_\*, convnext_\*"),
        ("squeezenet1_1", "head", "does not end in a linear layer"),
        ("googlenet", "head", "has other heads beside its last layer"),
    ],
)
def test_models_that_do_not_fit(vision: Any, name: str, tune: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        load_image_classifier(f"torchvision:{name}", (3, 8, 8), 2, Tuning(tune), "some.safetensors")
    assert "\n" not in str(refused.value)


def test_an_unknown_name_is_refused_before_images_are_read(
    vision: Any, values: dict[str, Any], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "reachable", lambda endpoint: True)
    monkeypatch.setattr("quietgrad.training.tasks.images.task.load_any_images", None)
    with pytest.raises(ValueError, match="no such classifier; did you mean 'resnet18'"):
        prepare(config_of(values | {"model.name": "torchvision:resnet19", "model.tune": "head"}))


def test_kept_weights_are_torchvisions_own(vision: Any, kept: Path) -> None:
    torch.manual_seed(0)
    own = vision.models.resnet18().eval()
    torch.save(own.state_dict(), kept / "resnet18-f37072fd.pth")
    model: Any = load_image_classifier(RESNET, (1, 8, 8), 2, Tuning("head")).eval()
    assert not model(noise(2, 1, 8, 8)).any()  # a head of zeros
    pixels = noise(2, 3, 224, 224)
    usual = vision.models.ResNet18_Weights.DEFAULT.transforms()
    normalised = ((pixels + 1) / 2 - torch.tensor(usual.mean)[:, None, None]) / torch.tensor(
        usual.std
    )[:, None, None]
    own.fc = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(model.embed(pixels), own(normalised), rtol=1e-4, atol=1e-5)


ALONE = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("quietgrad", "transformers"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
import torch
"""


def test_a_run_loads_by_torchvision_alone(
    kept: Path, values: dict[str, Any], smallest_file: Path, quietgrad: Any, tmp_path: Path
) -> None:
    values |= {"model.name": SMALLEST, "model.tune": "head", "model.weights": str(smallest_file)}
    prepared, outcome, run_dir = train(values | {"data.public": False})
    classifier: Any = prepared.model.classifier.eval()
    batch = prepared.test.collate(np.arange(6), CPU)["pixels"]
    folder = run_dir.model / "torchvision"

    # what the cards say, word for word
    ((said),) = re.findall(r"```python\n(.*?)```", (run_dir.model / "README.md").read_text(), re.S)
    (inner,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    assert said.replace("RUN_DIR/model/torchvision", "this folder") == inner
    pixels = noise(3, 3, 224, 224)
    torch.save(pixels, tmp_path / "given.pt")
    script = (
        ALONE
        + said.replace("RUN_DIR", str(run_dir.path))
        + (
            f"with torch.no_grad(): logits = model(torch.load({str(tmp_path / 'given.pt')!r}))\n"
            f"torch.save((logits, labels), {str(tmp_path / 'found.pt')!r})\n"
        )
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    logits, labels = torch.load(tmp_path / "found.pt")
    assert labels == ["across", "down"]
    with torch.no_grad():
        wanted = classifier((pixels * classifier.std + classifier.mean) * 2 - 1)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)

    told = json.loads((folder / "labels.json").read_text())
    assert told["model"] == "shufflenet_v2_x0_5" and told["arguments"] == {"num_classes": 2}
    assert told["pixels"]["size"] == 224
    for place in (folder, run_dir.model):
        card = (place / "README.md").read_text()
        assert "library_name: torchvision" in card and "(epsilon, delta) = " in card
        assert str(tmp_path) not in card
    record = read_provenance(folder)
    assert record is not None and record["epsilon"] == outcome.result["epsilon"]

    # the run at work, where torchvision's own weights are not
    out = tmp_path / "predictions.csv"
    source = values["data.source"]
    code, _, err = quietgrad("predict", run_dir.path, f"{source}/test", "--output", out)
    assert code == 0, err
    code, _, err = quietgrad("export", run_dir.path, "-o", tmp_path / "model.pt2")
    assert code == 0, err
    program = torch.export.load(tmp_path / "model.pt2").module()
    config = load_config(run_dir.config)
    given = kind_of(config).exportable(config, run_dir.model)
    with torch.no_grad():
        torch.testing.assert_close(given.module(batch), classifier(batch), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(program(batch), classifier(batch), rtol=1e-4, atol=1e-4)

    # as a start
    again = values | {"model.weights": str(folder / "model.safetensors"), "data.public": False}
    with pytest.raises(ValueError, match=f'model.accept_start = "{EPSILONS_ADD}"'):
        prepare(config_of(again))
    second: Any = prepare(config_of(again | {"model.accept_start": EPSILONS_ADD})).model.classifier
    with torch.no_grad():
        torch.testing.assert_close(second.eval()(batch), classifier(batch), rtol=1e-4, atol=1e-5)


def tiny(models: Any, kind: str, labels: int = 3, drop: float = 0.0) -> nn.Module:
    """The architecture at a size of some thousand numbers."""
    if kind == "vit":
        return models.VisionTransformer(16, 8, 2, 2, 8, 16, num_classes=labels)
    if kind == "convnext":
        block = models.convnext.CNBlockConfig
        blocks = [block(8, 16, 1), block(16, None, 1)]
        return models.ConvNeXt(blocks, stochastic_depth_prob=drop, num_classes=labels)
    if kind == "swin":
        return models.SwinTransformer(
            [4, 4], 8, [2], [2], [4, 4], stochastic_depth_prob=drop, num_classes=labels
        )
    return models.resnet.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=labels)


@pytest.mark.parametrize(
    ("kind", "tune"), [("vit", "full"), ("convnext", "full"), ("resnet", "head")]
)
def test_clipping_agrees_with_the_oracle(vision: Any, kind: str, tune: str) -> None:
    torch.manual_seed(0)
    stated = SimpleNamespace(crop_size=[16], mean=MEAN, std=STD)
    model = VisionClassifier(tiny(vision.models, kind), kind, 3, {}, stated)
    if tune == "head":
        model.backbone.requires_grad_(False)
    off_zero(model).train()
    batch = {"pixels": noise(3, 1, 8, 8), "labels": torch.tensor([0, 2, 1])}
    assert verify_clipping(model, classification_loss, batch) < 1e-4

    # to torchvision's names and back
    state = model.vision_state()
    plain = tiny(vision.models, kind)
    assert set(state) == set(plain.state_dict())
    own = model.own_state(state)
    assert own.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in own.items())
    last = f"{model.place}."
    fewer = {name: v[:2] if name.startswith(last) else v for name, v in state.items()}
    model.load_state_dict(model.own_state(fewer))  # of other labels: the head stays as it is
    assert torch.equal(model.head.weight, own["head.weight"])


def test_what_torchvision_computes_otherwise_is_not_written(
    smallest_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load_image_classifier(SMALLEST, (3, 8, 8), 2, Tuning("head"), str(smallest_file))
    assert write_vision(model, ["a", "b"], False, tmp_path / "good")
    nn.init.ones_(model.head.bias)
    whole = model.vision_state()
    monkeypatch.setattr(model, "vision_state", lambda: whole | {"fc.bias": torch.zeros(2)})
    assert not write_vision(model, ["a", "b"], False, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("name", ["convnext_tiny", "swin_t"])
def test_a_network_without_batch_norm_trains_whole(
    vision: Any,
    values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    def small(asked: str, num_classes: int = 1000) -> nn.Module:
        assert asked == name
        return tiny(vision.models, name.partition("_")[0], num_classes, drop=0.5)

    monkeypatch.setattr(vision.models, "get_model", small)
    torch.manual_seed(0)
    file = tmp_path / "begin.safetensors"
    save_file(small(name).state_dict(), str(file))
    changed = {
        "model.name": f"torchvision:{name}", "model.tune": "full", "model.weights": str(file),
        "training.expected_batch_size": 4, "training.steps": 2, "training.eval_every": 0,
    }  # fmt: skip
    if name == "swin_t":  # its attention uses layers without calling them
        changed["performance.engine"] = "one-example"
    prepared, outcome, run_dir = train(values | changed)
    verify_on_public_records(prepared)
    parts: list[Any] = list(prepared.model.classifier.modules())
    paths = [part for part in parts if type(part).__name__ == "StochasticDepth"]
    assert paths and all(path.p == 0.0 for path in paths)
    assert outcome.result["epsilon"] <= 8
    assert (run_dir.model / "torchvision" / "model.safetensors").is_file()
