"""Run directories without this library: a process that cannot import quietgrad loads the folders
and gets the run's own logits and label names.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from tiny_runs import config_of, train

from quietgrad.checks import SettingsWarning
from quietgrad.training.files.provenance import EPSILONS_ADD, read_provenance
from quietgrad.training.prepare import prepare
from quietgrad.training.tasks.images.adapter import write_adapter
from quietgrad.training.tasks.text.exported import name_base
from quietgrad.training.tasks.text.models import HUB_NAMES, PACKAGED_MINILM
from quietgrad.training.tasks.text.saved import load_saved

CPU = torch.device("cpu")
# Reads requests, one JSON object a line, and answers each with a line: "" or the error. Importing
# transformers takes seconds, so one process loads all folders.
ALONE = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "quietgrad":
            raise ImportError("quietgrad is not installed here")

sys.meta_path.insert(0, Blocked())
import json, os, torch, transformers

asked = os.fdopen(os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # transformers asks there whether to trust code

def answer(kind, folder, place, trust):
    more = {"trust_remote_code": True} if trust else {}
    model = getattr(transformers, kind).from_pretrained(folder, **more).eval()
    assert "quietgrad" not in sys.modules
    given = torch.load(place)
    with torch.no_grad():
        logits = model(**given["inputs"]).logits
    names = [model.config.id2label[i] for i in range(len(model.config.id2label))]
    words = {}
    if "text" in given:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        found = tokenizer(given["text"], return_tensors="pt")
        words = {k: v.tolist() for k, v in found.items()}
    torch.save({"logits": logits, "names": names, "words": words}, place)

for line in asked:
    try:
        answer(*json.loads(line))
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("answer:", json.dumps(said), flush=True)
"""
Load = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def load_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Loads a folder by a class of transformers in a process that cannot import quietgrad: the
    error, or "", and the logits of the inputs, the labels' names and the tokenizer's words.
    """
    home = tmp_path_factory.mktemp("alone")
    environment = {
        "PATH": "", "HOME": str(home), "HF_HOME": str(home / "hf"),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=home,
    )
    assert process.stdin is not None and process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def load(
        kind: str, folder: Path, inputs: dict[str, Any], trust: bool = False
    ) -> tuple[str, dict[str, Any]]:
        place = home / "io.pt"
        torch.save(inputs, place)
        print(json.dumps([kind, str(folder), str(place), trust]), file=asked, flush=True)
        said = next((line for line in answers if "answer: " in line), None)
        assert said is not None, "the process has ended"
        return json.loads(said.partition("answer: ")[2]), torch.load(place)

    yield load
    asked.close()
    assert process.wait() == 0
    answers.close()


@pytest.mark.grid(4, "every head and every way to train, a run and a load each")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("tune", "head"),
    [
        ("lora", "mean"),
        ("lora", "auto"),
        ("full", "auto"),
        ("full", "mean"),
        ("head", "mean"),
        ("head", "layers"),
        ("head", "auto"),
        ("lora", "layers"),
    ],
)
def test_a_text_classifier_loads_by_transformers_alone(
    settings: dict[str, Any], load_alone: Load, tmp_path: Path, tune: str, head: str
) -> None:
    values = settings | {"model.tune": tune, "model.head": head, "data.public": False}
    prepared, outcome, run_dir = train(values | {"optimizer.learning_rate": 5e-2})
    folder = run_dir.model
    batch = prepared.test.collate(np.arange(8), CPU)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    classifier = prepared.model.classifier.eval()
    with torch.no_grad():
        wanted = classifier(**inputs)
    given = {"inputs": inputs, "text": "the film was great"}
    error, found = load_alone("AutoModelForSequenceClassification", folder, given, head != "auto")
    assert not error
    assert found["names"] == ["bad", "good"]
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found["logits"], wanted, rtol=0, atol=1e-5)
    assert set(found["words"]) == {"input_ids", "attention_mask"}
    written = json.loads((folder / "config.json").read_text())
    assert written["id2label"] == {"0": "bad", "1": "good"} and "label2id" in written
    if head != "auto":
        error, _ = load_alone("AutoModelForSequenceClassification", folder, given)
        assert "trust_remote_code=True" in error

    adapter = folder / "adapter"
    assert adapter.exists() is (tune == "lora")
    for place in (folder, adapter) if tune == "lora" else (folder,):
        card = (place / "README.md").read_text()
        assert "from_pretrained" in card and "add or remove one record" in card
        assert f"all {outcome.result['steps']} steps" in card and "sampling at rate" in card
        assert "Gaussian noise of multiplier" in card and '"reviews.csv"' in card
        assert str(tmp_path) not in card and values["model.name"] not in card
        record = read_provenance(place)
        assert record is not None and record["epsilon"] == outcome.result["epsilon"]
        with pytest.raises(ValueError, match=f'model.accept_start = "{EPSILONS_ADD}"'):
            prepare(config_of(values | {"model.name": str(place), "model.tune": "head"}))
    texts = [p for p in folder.rglob("*") if p.suffix in (".json", ".md", ".jinja", ".txt")]
    for path in texts:  # whoever gets the folder need not know where it was made
        assert values["model.name"] not in path.read_text(), path
        assert str(tmp_path) not in path.read_text(), path


@pytest.mark.distributed
@pytest.mark.parametrize("tune", ["lora", "full"])
def test_a_language_model_loads_by_transformers_alone(
    settings: dict[str, Any], tiny_llama: Path, load_alone: Load, tune: str
) -> None:
    changed = {
        "model.name": str(tiny_llama), "model.tune": tune, "task.kind": "generate",
        "task.prompt": "{text} :", "task.answer": "{label}", "task.max_answer_length": 3,
        "optimizer.learning_rate": 5e-2,
    }  # fmt: skip
    prepared, _, run_dir = train(settings | changed)
    batch = prepared.test.collate(np.arange(8), CPU)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        wanted = prepared.model.classifier.eval()(**inputs)
    folder = run_dir.model
    error, found = load_alone("AutoModelForCausalLM", folder, {"inputs": inputs})
    assert not error
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(found["logits"][seen], wanted[seen], rtol=0, atol=1e-5)
    assert "AutoModelForCausalLM" in (folder / "README.md").read_text()
    if tune == "lora":
        assert "loaded by `AutoModelForCausalLM`" in (folder / "adapter" / "README.md").read_text()
    assert read_provenance(folder) is not None


def test_an_adapter_names_a_packaged_base_as_the_hub_does(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text('{"base_model_name_or_path": "/somewhere", "r": 2}')
    name_base(tmp_path, PACKAGED_MINILM)
    written = json.loads(file.read_text())
    assert written == {"base_model_name_or_path": "sentence-transformers/all-MiniLM-L6-v2", "r": 2}
    assert set(HUB_NAMES) == {"packaged:minilm", "packaged:smollm2"}


@pytest.mark.parametrize("head", ["mean", "auto"])
def test_an_adapter_loads_by_peft_and_names_no_path(
    settings: dict[str, Any], tiny_bert: Path, head: str
) -> None:
    values = settings | {"model.tune": "lora", "model.head": head, "optimizer.learning_rate": 5e-2}
    prepared, _, run_dir = train(values)
    adapter = run_dir.model / "adapter"
    named = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == tiny_bert.name
    kind = transformers.AutoModelForSequenceClassification if head == "auto" else None
    base = (kind or transformers.AutoModel).from_pretrained(tiny_bert)
    said = "`AutoModelForSequenceClassification` with `num_labels=2`" if kind else "`AutoModel`"
    assert f"loaded by {said}" in (adapter / "README.md").read_text()
    plain = {name: p.detach().clone() for name, p in base.named_parameters()}
    adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
    inputs = {k: v for k, v in prepared.test.collate(np.arange(4), CPU).items() if k != "labels"}
    with torch.no_grad():
        found, wanted = (
            encoder(**inputs) for encoder in (adapted, prepared.model.classifier.eval().encoder)
        )
    place = "logits" if head == "auto" else "last_hidden_state"
    torch.testing.assert_close(found[place], wanted[place], rtol=1e-4, atol=1e-5)
    merged = dict(adapted.merge_and_unload().named_parameters())
    assert any(not torch.equal(merged[name], p) for name, p in plain.items())


def test_a_run_starts_from_the_model_of_another(settings: dict[str, Any]) -> None:
    values = settings | {"model.tune": "lora", "optimizer.learning_rate": 5e-2}
    first, _, run_dir = train(values)
    changed = values | {"model.name": str(run_dir.model), "model.accept_start": EPSILONS_ADD}
    second = prepare(config_of(changed | {"model.tune": "head"}))
    inputs = {k: v for k, v in first.test.collate(np.arange(4), CPU).items() if k != "labels"}
    with torch.no_grad():
        one, other = (
            p.model.classifier.eval().encoder(**inputs).last_hidden_state for p in (first, second)
        )
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"trained with model\.head='mean' or 'layers'; set that"):
        prepare(config_of(changed | {"model.head": "auto"}))


@pytest.mark.parametrize(("tune", "head"), [("lora", "auto"), ("full", "mean")])
def test_a_model_that_cannot_be_written_whole_is_saved_in_parts(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tune: str, head: str
) -> None:
    """The privacy is spent by then: a run must not end in an error of another library."""

    def refuse(*arguments: Any) -> None:
        raise NotImplementedError("no such thing\nmore")

    monkeypatch.setattr("quietgrad.training.tasks.text.exported._whole", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = settings | {"model.tune": tune, "model.head": head}
        prepared, outcome, run_dir = train(values | {"optimizer.learning_rate": 5e-2})
    (said,) = [str(w.message) for w in caught if w.category is SettingsWarning]
    assert "could not be written as one (NotImplementedError: no such thing)" in said
    assert run_dir.result.is_file() and outcome.result["epsilon"] <= 4
    assert "the model is in parts" in (run_dir.model / "README.md").read_text()
    classifier, _, labels = load_saved(run_dir.model)
    assert labels == ["bad", "good"]
    inputs = {k: v for k, v in prepared.test.collate(np.arange(4), CPU).items() if k != "labels"}
    with torch.no_grad():
        one, other = (m(**inputs) for m in (classifier, prepared.model.classifier.eval()))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with pytest.raises((ValueError, OSError)):
        transformers.AutoModelForSequenceClassification.from_pretrained(run_dir.model)


@pytest.mark.distributed
@pytest.mark.parametrize(("model", "tune"), [("vit", "lora"), ("resnet", "head")])
def test_an_image_model_of_hugging_face_loads_by_transformers_alone(
    values: dict[str, Any], vit: Path, resnet: Path, load_alone: Load, model: str, tune: str
) -> None:
    name = f"image:{dict(vit=vit, resnet=resnet)[model]}"
    changed = {"model.name": name, "model.tune": tune, "data.image_size": 16}
    prepared, _, run_dir = train(values | changed)
    classifier: Any = prepared.model.classifier.eval()
    pixels = prepared.test.collate(np.arange(6), CPU)["pixels"].expand(-1, 3, -1, -1)
    with torch.no_grad():
        wanted = classifier(pixels)
    inputs = {"pixel_values": ((pixels + 1) / 2 - classifier.mean) / classifier.std}
    folder = run_dir.model / "transformers"
    error, found = load_alone("AutoModelForImageClassification", folder, {"inputs": inputs})
    assert not error
    assert found["names"] == ["across", "down"] and wanted.abs().max() > 1e-3
    torch.testing.assert_close(found["logits"], wanted, rtol=0, atol=1e-5)
    stated = json.loads((folder / "preprocessor_config.json").read_text())
    assert stated["image_mean"] == pytest.approx(classifier.mean.flatten().tolist())
    assert read_provenance(folder) is not None
    for place in (folder, run_dir.model):
        card = (place / "README.md").read_text()
        assert "AutoModelForImageClassification" in card and "(epsilon, delta) = " in card


def test_an_image_model_of_our_own_says_how_it_loads(values: dict[str, Any]) -> None:
    _, _, run_dir = train(values | {"model.name": "cnn:groupnorm", "model.tune": "full"})
    card = (run_dir.model / "README.md").read_text()
    assert "state dict of `SmallCnn`" in card and "no file of timm or torchvision" in card
    assert "Without Quietgrad: what `quietgrad export RUN_DIR -o model.pt2` writes" in card
    assert not (run_dir.model / "transformers").exists()


@pytest.mark.distributed
def test_the_adapter_of_an_image_model_loads_by_peft(values: dict[str, Any], vit: Path) -> None:
    changed = {"model.name": f"image:{vit}", "model.tune": "lora", "data.image_size": 16}
    prepared, _, run_dir = train(values | changed)
    classifier: Any = prepared.model.classifier.eval()
    pixels = prepared.test.collate(np.arange(6), CPU)["pixels"].expand(-1, 3, -1, -1)
    base = transformers.AutoModelForImageClassification.from_pretrained(
        vit, num_labels=2, ignore_mismatched_sizes=True
    )
    folder = run_dir.model / "adapter"
    found = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        wanted = classifier(pixels)
        logits = found(pixel_values=((pixels + 1) / 2 - classifier.mean) / classifier.std).logits
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
    stated = json.loads((folder / "adapter_config.json").read_text())
    assert stated["base_model_name_or_path"] == vit.name  # no path of this machine
    assert read_provenance(folder) is not None
    for place in (folder, run_dir.model):
        assert "PeftModel" in (place / "README.md").read_text()
    for file in run_dir.model.rglob("*.[jm]*"):  # .json, .md
        assert str(vit.parent) not in file.read_text(), file
    base_of = json.loads((run_dir.model / "quietgrad.json").read_text())["base"]
    assert base_of == f"image:{vit.name}"


def test_an_adapter_that_computes_otherwise_is_not_left(vit: Path, tmp_path: Path) -> None:
    whole = transformers.AutoModelForImageClassification.from_pretrained(vit).eval()
    body: Any = copy.deepcopy(whole.vit)
    adapted = peft.get_peft_model(body, peft.LoraConfig(target_modules=["q_proj"]))
    images = torch.rand(2, 3, 16, 16)
    written = tmp_path / "right"
    assert write_adapter(adapted, whole, "classifier", "a/b", images, written)
    with torch.no_grad():
        whole.vit.layernorm.weight.mul_(2.0)  # no adapter makes that
    assert not write_adapter(adapted, whole, "classifier", "a/b", images, tmp_path / "wrong")
    assert written.exists() and not (tmp_path / "wrong").exists()
