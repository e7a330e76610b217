"""From a CSV of reviews to predictions through each of the four doors: the command line, a loop of
one's own, PrivateTrainer and PrivateLightningModule. See docs/loops.md, "Four doors".

    python examples/four_doors.py [--full] [--folder FOLDER]

The reviews are the packaged tweets, written to a CSV. What a user of a door writes is in
``examples/doors``; here each is started in a process of its own, timed and compared. All have one
seed and one budget, so they must spend the same epsilon; and the three loops must end with the same
weights, to the bit (docs/trainer.md, docs/lightning.md). Noise is drawn by the names of parameters,
and ``self.net`` of the Lightning module puts "net." before them: that door is compared with the
plain loop over a module that says so, too. The command line draws a head of its own and names its
model's parameters in its own way: it is compared with the plain loop over the model that it starts
from.
"""

import argparse
import csv
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from quietgrad.accounting import epsilon_report
from quietgrad.ledger import read_ledger
from quietgrad.training.tasks.splits import split
from quietgrad.training.tasks.text.data import LabelledTexts, load_texts
from quietgrad.training.tasks.text.models import model_path

DOORS = Path(__file__).parent / "doors"
LOOPS = {
    "plain loop": "plain_loop",
    "PrivateTrainer": "hugging_face",
    "PrivateLightningModule": "in_lightning",
}
NAMED = "named_alike"
# The plain loop, over the same model under the name that the Lightning module gives it.
NAMED_LOOP = f"""
import runpy, sys, torch
sys.path.insert(0, {str(DOORS)!r})
import reviews

class Named(torch.nn.Module):
    def __init__(self, model=reviews.classifier):
        super().__init__()
        self.net = model()

    def forward(self, **batch):
        return self.net(**batch)

    def save_pretrained(self, folder):
        self.net.save_pretrained(folder)

reviews.classifier = Named
runpy.run_path({str(DOORS / "plain_loop.py")!r})
"""
# The plain loop, over the model and micro-batches that the command line begins with.
COMMANDED = "commanded"
COMMANDED_LOOP = """
import json, sys, torch
from pathlib import Path
from quietgrad import PrivacyConfig
from quietgrad.training.prepare import prepare
from quietgrad.training.settings.config import load_config

begin = prepare(load_config(Path("command_line.toml"), sys.argv[1:]))
settings = json.loads(Path("settings.json").read_text())
model, loss = begin.model.classifier, begin.loss()
optimizer = torch.optim.AdamW(model.parameters(), lr=settings["rate"], weight_decay=0.0)
model.train()
with PrivacyConfig(**settings["privacy"]).build(len(begin.train)).start() as run:
    for indices in run.batches():
        run.backward(model, loss, begin.micro_batches(indices, None))
        optimizer.step()
        optimizer.zero_grad()
model.encoder.save_pretrained("commanded")
"""
SHARED, WEIGHTS = "reviews.py", "adapter_model.safetensors"


def write_rows(path, texts):
    words = [texts.label_names[i] for i in texts.labels]
    with open(path, "w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows([("text", "label"), *zip(texts.texts, words, strict=True)])


def write_reviews(folder, number, seed=0):
    """``reviews.csv`` for the command line, which divides them itself; the same parts in files of
    their own for the loops. Returns the labels.
    """
    tweets = load_texts("packaged:tweets", "text", "label")
    kept = np.array(random.Random(seed).sample(range(len(tweets)), number))
    reviews: LabelledTexts = tweets.subset(kept)
    parts = split(reviews, 0.1, 0.1)
    write_rows(folder / "reviews.csv", reviews)
    write_rows(folder / "train.csv", parts.train)
    write_rows(folder / "public.csv", parts.test)
    return list(reviews.label_names)


def column(path, name):
    with open(path, newline="", encoding="utf-8") as lines:
        return [row[name] for row in csv.DictReader(lines)]


def seconds(command, folder):
    """One door, from its start to its predictions."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    begun = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": tools}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return time.perf_counter() - begun


def lines_of(*names):
    """Lines that say something: no blank ones, comments or descriptions of the file."""
    found = 0
    for name in names:
        text = (DOORS / name).read_text(encoding="utf-8")
        told = [line.strip() for line in text.splitlines()]
        found += sum(bool(line) and not line.startswith(("#", '"""')) for line in told)
    return found


def spent(folder):
    """(epsilon, delta) of the releases that a door's ledger counts, an upper bound."""
    ledger = read_ledger(folder / "ledger.jsonl")
    delta = ledger.header["delta"]
    return epsilon_report(ledger.event, delta).epsilon, delta


def require_alike(folder, privacies):
    """One epsilon at all doors, and the weights of a plain loop at each.

    Raises:
        SystemExit: where they differ.
    """
    if len(set(privacies.values())) != 1:
        raise SystemExit(f"the doors spent different (epsilon, delta): {privacies}")
    plain = LOOPS["plain loop"]
    pairs = {
        "command line": ("command_line/model/adapter", COMMANDED),
        "PrivateTrainer": (f"{LOOPS['PrivateTrainer']}/model", f"{plain}/model"),
        "PrivateLightningModule": (
            f"{LOOPS['PrivateLightningModule']}/model",
            f"{NAMED}/{plain}/model",
        ),
    }
    for door, places in pairs.items():
        ours, theirs = (load_file(folder / place / WEIGHTS) for place in places)
        alike = ours.keys() == theirs.keys()
        if not alike or not all(torch.equal(ours[name], theirs[name]) for name in ours):
            raise SystemExit(f"{door} did not end with the weights of the plain loop")


def loop_named_alike(folder):
    """The plain loop again, in a folder of its own, for the weights of the Lightning module."""
    inside = folder / NAMED
    inside.mkdir()
    for name in ("settings.json", "train.csv", "public.csv"):
        shutil.copy(folder / name, inside)
    seconds([sys.executable, "-c", NAMED_LOOP], inside)


def run(folder, number, batch, steps):
    """All doors; prints the table."""
    labels = write_reviews(folder, number)
    training, public = (column(folder / f"{part}.csv", "label") for part in ("train", "public"))
    # A seed serves one run where data are private (it is left out there): here four runs shall be
    # the same, on tweets that everybody may read.
    seed = f"{random.Random(0).getrandbits(128):032x}"
    privacy = {"target_epsilon": 8.0, "expected_batch_size": batch, "steps": steps, "seed": seed}
    settings = {
        "model": model_path("packaged:minilm"),
        "labels": labels,
        "rate": 2e-3,
        "privacy": privacy | {"data_are_public": True},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    overrides = {
        "learning_rate": settings["rate"],
        "expected_batch_size": batch,
        "steps": steps,
        "training.seed": seed,
        "data.public": "true",
    }
    given = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    shutil.copy(DOORS / "command_line.toml", folder)
    doors = {"command line": ("command_line", ["bash", str(DOORS / "command_line.sh"), *given])}
    doors |= {
        door: (name, [sys.executable, str(DOORS / f"{name}.py")]) for door, name in LOOPS.items()
    }
    lines = {door: lines_of(f"{name}.py", SHARED) for door, name in LOOPS.items()}
    lines["command line"] = lines_of("command_line.toml", "command_line.sh")
    rows, privacies = [], {}
    print(f"{len(training)} private reviews, {len(public)} public ones, {steps} steps of {batch}")
    for door, (name, command) in doors.items():
        taken = seconds(command, folder)
        privacies[door] = spent(folder / name)
        predicted = column(folder / name / "predictions.csv", "predicted")
        right = sum(one == other for one, other in zip(predicted, public, strict=True))
        rows.append((door, taken, privacies[door][0], right / len(public), lines[door]))
    print(f"{'door':24s}{'seconds':>8s}{'epsilon':>9s}{'accuracy':>10s}{'lines':>7s}")
    for door, taken, epsilon, accuracy, count in rows:
        shown = math.ceil(epsilon * 1000) / 1000
        print(f"{door:24s}{taken:8.0f}{shown:9.3f}{accuracy:10.3f}{count:7d}")
    loop_named_alike(folder)
    seconds([sys.executable, "-c", COMMANDED_LOOP, *given[1::2]], folder)
    require_alike(folder, privacies)
    print("one epsilon at all doors; the three loops ended with the same weights, to the bit")
    print("the command line ended with those of a plain loop over the model it starts from")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="reviews and steps enough to learn")
    parser.add_argument("--folder", help="where it all lies; none: it is not kept")
    args = parser.parse_args()
    full = {"number": 4000, "batch": 128, "steps": 30}
    size = full if args.full else {"number": 400, "batch": 32, "steps": 3}
    with tempfile.TemporaryDirectory() as passing:
        folder = Path(args.folder or passing)
        folder.mkdir(parents=True, exist_ok=True)
        run(folder, **size)


if __name__ == "__main__":
    main()
