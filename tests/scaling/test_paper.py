"""Models on paper: what is counted without weights is what is counted with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scaling.steps import made, small_shape

from quietgrad.clipping.clipper import Clipper
from quietgrad.scaling.paper import models
from quietgrad.scaling.paper.held import Held
from quietgrad.scaling.paper.models import (
    Tuning,
    alike,
    causal_loss,
    fake_model,
    paper_of_model,
    paper_of_shape,
    parts_of,
)
from quietgrad.scaling.paper.shapes import NAMED, of_config, shape_of
from quietgrad.scaling.ways import memory
from quietgrad.scaling.ways.devices import NAMED as DEVICES
from quietgrad.scaling.ways.devices import device_of

# Parameters of the published models, as their pages count them.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
}
SHAPE = small_shape(256, 32, 7, 96)
EXACT = Clipper(1.0, "auto")


def test_shapes_by_name_have_the_published_parameters() -> None:
    assert set(NAMED) == set(PUBLISHED)
    for name, published in PUBLISHED.items():
        model, _, _ = fake_model(NAMED[name], Tuning())
        assert sum(p.numel() for p in model.parameters()) == published, name


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(dtype="float32"),
        Tuning(lora=4, dtype="float32"),
        Tuning(dtype="float32", checkpointing=True),
    ],
    ids=["full", "lora", "checkpointing"],
)
def test_two_and_three_blocks_tell_of_seven(tuning: Tuning) -> None:
    grown = paper_of_shape(SHAPE, tuning, 3, 40, EXACT)
    whole = paper_of_shape(SHAPE, tuning, 3, 40, EXACT, whole=True)
    assert grown.peak() == pytest.approx(whole.peak(), rel=0.02)
    assert grown.trained_entries == whole.trained_entries
    assert grown.parameter_bytes == whole.parameter_bytes
    assert sorted(p.name for p in grown.parameters) == sorted(p.name for p in whole.parameters)
    for name in ("multiplications", "weight_multiplications", "saved_bytes", "calls"):
        assert getattr(grown.trace, name) == pytest.approx(getattr(whole.trace, name), rel=0.02)
    two = paper_of_shape(SHAPE.with_layers(2), tuning, 3, 40, EXACT)
    assert two.peak() < 0.8 * whole.peak()


@pytest.mark.parametrize("estimator", ["auto", "hutch", "hutch++"])
def test_weights_of_half_the_width_hold_less(estimator: str) -> None:
    """No guard has looked at them; that they are of half precision stands before."""
    clipper, shape = Clipper(1.0, estimator), SHAPE.with_layers(2)  # type: ignore[arg-type]
    half, single = (
        paper_of_shape(shape, Tuning(dtype=dtype), 3, 40, clipper)
        for dtype in ("bfloat16", "float32")
    )
    assert half.parameter_bytes * 2 == single.parameter_bytes
    assert 0.4 * single.peak() < half.peak() < single.peak()


def test_a_device_of_two_has_half_of_what_is_cut() -> None:
    whole, half = (paper_of_shape(SHAPE, Tuning(parts=parts), 2, 16, EXACT) for parts in (1, 2))
    shapes = {p.name: p.shape for p in half.parameters}
    for p in whole.parameters:
        name = p.name.replace("lm_head", "lm_head.layer")
        dim = None if "norm" in name else int("o_proj" in name or "down_proj" in name)
        assert shapes[name] == tuple(n // 2 if i == dim else n for i, n in enumerate(p.shape)), name
    assert whole.sent_per_position == 0
    # Half of two copies of what is added up, and half of the words' numbers, in bfloat16.
    assert half.sent_per_position == 2 * (7 * 7 * 32 + 2 * 32 + 256 / 2)
    adapted = [
        {p.name for p in paper_of_shape(SHAPE, one, 2, 16, EXACT).parameters if p.trained}
        for one in (Tuning(lora=4), Tuning(lora=4, parts=2))
    ]
    assert adapted[0] == adapted[1] and not any("lm_head" in name for name in adapted[1])
    again = paper_of_shape(SHAPE, Tuning(parts=2, checkpointing=True), 2, 16, EXACT)
    assert again.sent_per_position == 2 * (9 * 7 * 32 + 2 * 32 + 256 / 2)


@pytest.mark.parametrize(
    ("name", "devices", "parts"),
    [
        ("llama-8b", 512, 8),
        ("llama-8b", 12, 4),
        ("llama-8b", 7, 1),
        ("qwen2.5-0.5b", 8, 2),  # of 2 heads of keys
        ("smollm2-135m", 8, 1),  # of 9 heads
    ],
)
def test_so_many_devices_share_a_record(name: str, devices: int, parts: int) -> None:
    assert parts_of(NAMED[name], devices) == parts


def test_what_transformers_cuts_by_no_plan_stays_whole() -> None:
    values = {
        "model_type": "gpt2",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
    }
    assert parts_of(of_config(values, "a GPT-2", "this test"), 8) == 1


def test_a_model_that_is_there_counts_as_its_shape() -> None:
    model = made(SHAPE)
    before = [p.clone() for p in model.parameters()]
    texts = {"input_ids": torch.randint(0, 256, (2, 40))}
    there = paper_of_model(model, causal_loss, texts, EXACT)(3, "bookkeeping")
    shape = paper_of_shape(SHAPE, Tuning(dtype="float32"), 3, 40, EXACT, whole=True)
    assert there.peak() == pytest.approx(shape.peak(), rel=0.02)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_folder_with_a_configuration_is_a_shape(tmp_path: Path) -> None:
    SHAPE.config().save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    assert shape.layers == 7
    model, _, _ = fake_model(shape, Tuning())
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in made(SHAPE).parameters()
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="num_hidden_layers"):
        shape_of(str(tmp_path))
    with pytest.raises(ValueError, match="llama-70b"):
        shape_of("llama-71b")
    with pytest.raises(ValueError, match="unknown to transformers"):
        replace(shape, values=(*shape.values[:-1], ("model_type", "nothing"))).config()


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "gemma2"])
def test_what_transformers_saves_of_other_models_is_a_shape(kind: str, tmp_path: Path) -> None:
    """Of GPT-2 by names of its own, of others with a kind for each block."""
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4}
    config = hf.AutoConfig.for_model(kind, **sizes, num_hidden_layers=6)
    config.update({"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8})
    config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    assert shape.layers == 6 and alike(shape)
    assert parts_of(shape, 4) == (1 if kind == "gpt2" else 2)
    grown = paper_of_shape(shape, Tuning(dtype="float32"), 2, 8, EXACT)
    whole = paper_of_shape(shape, Tuning(dtype="float32"), 2, 8, EXACT, whole=True)
    assert len(grown.parameters) == len(whole.parameters)
    assert set(grown.parameters) == set(whole.parameters)
    assert grown.peak() == pytest.approx(whole.peak(), rel=0.01)


def test_a_model_of_unlike_blocks_is_run_whole() -> None:
    kinds = ["conv", "conv", "conv", "conv", "full_attention"]
    values = dict(small_shape(64, 32, 5, 48).values) | {"model_type": "lfm2", "layer_types": kinds}
    shape = of_config(values, "an LFM2", "this test")
    assert shape.with_layers(2).by_block["layer_types"] == kinds[:2]
    assert not alike(shape) and alike(shape.with_layers(4)) and alike(SHAPE)


def test_blocks_that_tell_nothing_of_others_are_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2 itself is not: it reads a convolution's weight, which nothing captures."""
    monkeypatch.setattr(models, "alike", lambda shape: False)
    shape, tuning = small_shape(64, 32, 5, 48), Tuning(dtype="float32")
    found = paper_of_shape(shape, tuning, 2, 8, EXACT)
    assert found == paper_of_shape(shape, tuning, 2, 8, EXACT, whole=True)
    assert "sums 3" in found.peaks  # of a grown one the first and the last block are labelled


def test_a_configuration_that_is_refused_is_named(tmp_path: Path) -> None:
    values = {"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": ["nothing"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"refused by transformers .* as a qwen2"):
        shape_of(str(tmp_path)).config()
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_attention_heads": None, "": 1}))
    with pytest.raises(ValueError, match="refused by transformers"):
        paper_of_shape(shape_of(str(tmp_path)), Tuning(parts=parts_of(SHAPE, 1)), 2, 8, EXACT)
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": ["qwen2"]}))
    with pytest.raises(ValueError, match="unknown to transformers"):
        shape_of(str(tmp_path)).config()
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_hidden_layers": "2"}))
    with pytest.raises(TypeError, match="num_hidden_layers='2'"):
        shape_of(str(tmp_path))


def test_weights_that_the_loss_does_not_reach_have_sums_of_zeros() -> None:
    """In a Whisper without an encoder's states most of a pass was less than its sums."""
    paper = paper_of_shape(SHAPE, Tuning(dtype="float32"), 1, 8, EXACT)
    held = memory.replicas(replace(paper, peaks={"forward": 1, "sums 0": 2}), memory.Job(1))
    assert held.activations == 0 and held.phases["clip"] == 4 * paper.trained_entries


def test_storages_are_counted_once_and_until_they_go() -> None:
    with Held() as held:
        x = torch.ones(1000)
        y = x.view(10, 100)[2:]
        assert held.now == 4000
        z = x + 1
        del x
        assert held.now == 8000  # a view holds the whole
        del y, z
        assert held.now == 0 and held.peak == 8000


def test_devices_name_their_source() -> None:
    assert len(DEVICES) >= 6
    for device in DEVICES.values():
        assert "datasheet" in device.source or device.kind == "cpu"
    assert device_of("h200").memory > device_of("h100-80gb").memory
    with pytest.raises(ValueError, match="choose one of"):
        device_of("abacus")
