"""What is left out of a configuration (docs/defaults.md) against the best of a random search, on
tasks that had no part in the making of the rule: other data, other numbers of records, and the
epsilons 1 and 8.

    python recipes/defaults_unseen.py run       # stops and resumes at any run
    python recipes/defaults_unseen.py report    # table of docs/notes/defaults_tested.md

``run`` writes each data set to a file, asks ``quietgrad init`` for a configuration of it, and runs
``quietgrad train`` with an epsilon and nothing else: what the run directory says that it trained
with is the rule's. Then comes the search: random settings with one seed each, the best three with
two more, and of these the best by validation. Rule and best are trained on fresh seeds by the same
code, and those runs alone are compared: so what a search gains by luck is no gap.

All records are public, and the choice is part of no epsilon. Every run is a line of
recipes/results/defaults_unseen.jsonl.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import inspect
import json
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defaults import BATCH, NORM, RATE, STEPS, Settings, Trainer, append, found, read, trial
from defaults_tasks import DefaultsTask

from quietgrad.training.settings.overrides import read_toml

RESULTS = Path(__file__).with_name("results") / "defaults_unseen.jsonl"
TRIALS, REPEATED = 24, 3
SEARCH_SEEDS, FRESH_SEEDS = (0, 1, 2), (10, 11, 12)
PACKAGES = ("quietgrad", "torch", "numpy", "scikit-learn", "transformers")
HELD_OUT = 2000  # validation and test records together, where there are enough
TOPICS = ("scipy", "torch")  # packages whose documentation is told apart
EPSILONS = (1.0, 8.0)

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Unseen:
    """One data set in one size.

    Attributes:
        rows: names of columns, then records; the last column is the label.
        train: records to train on, about (a hash decides); 0 for three fifths of all.
    """

    rows: Callable[[], Iterator[Row]]
    train: int = 0

    @property
    def name(self) -> str:
        return self.rows.__name__ + (f", {self.train}" if self.train else "")


def cancer() -> Iterator[Row]:
    """569 rows of 30 numbers, two classes (scikit-learn's wheel)."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    yield (*data.feature_names, "diagnosis")
    for row, label in zip(data.data, data.target, strict=True):
        yield (*row, data.target_names[label])


def digits() -> Iterator[Row]:
    """1797 rows of 64 numbers, ten classes (scikit-learn's wheel)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    yield (*(f"pixel {i}" for i in range(data.data.shape[1])), "digit")
    for row, label in zip(data.data, data.target, strict=True):
        yield (*map(int, row), f"is {label}")


def orders() -> Iterator[Row]:
    """Made rows, mostly categories, three unequal classes; one row in seven is wrong."""
    draw = np.random.default_rng(31)
    count = 9000
    sizes = {"shop": 15, "day": 7, "method": 4, "country": 25, "member": 2}
    words = {name: draw.integers(size, size=count) for name, size in sizes.items()}
    amount = draw.lognormal(3, 1, count)
    age = draw.integers(18, 80, count)
    push = {name: draw.normal(size=(size, 3)) for name, size in sizes.items()}
    score = sum(push[name][words[name]] for name in ("shop", "method", "country"))
    both = draw.normal(size=(4, 2, 3))[words["method"], words["member"]]
    score = score + both + np.stack([np.log(amount) - 3, 0 * amount, (age - 50) / 20], axis=1)
    label = np.argmax(score + np.array([0.8, 0, 0]), axis=1)
    label = np.where(draw.random(count) < 1 / 7, draw.integers(3, size=count), label)
    yield ("amount", "age", *sizes, "outcome")
    for i in range(count):
        cells = (f"{name} {words[name][i]}" for name in sizes)
        yield (f"{amount[i]:.2f}", age[i], *cells, ("kept", "late", "returned")[label[i]])


def documentation() -> Iterator[Row]:
    """Paragraphs of the documentation of two packages, to be told apart without their names."""
    yield ("text", "package")
    for name in TOPICS:
        for text in sorted(paragraphs(name)):
            yield (text, name)


def paragraphs(name: str) -> set[str]:
    """Plain paragraphs of docstrings of a package's modules that are loaded with it."""
    import scipy.integrate
    import scipy.optimize
    import scipy.signal
    import scipy.sparse
    import scipy.stats  # noqa: F401

    texts: set[str] = set()
    for module, loaded in sorted(sys.modules.items()):
        if module.split(".")[0] != name or loaded is None:
            continue
        for owner in [loaded, *vars(loaded).values()]:
            said = owner.__dict__ if isinstance(owner, type) else {}
            for thing in [owner, *said.values()]:
                doc = getattr(thing, "__doc__", None)
                if isinstance(doc, str):
                    texts.update(plain(inspect.cleandoc(doc)))
    return texts


def plain(doc: str) -> Iterator[str]:
    """Paragraphs of a sentence or more, the packages' names taken out."""
    for part in doc.split("\n\n"):
        text = " ".join(part.split())
        words = text.split(" ")
        if 8 <= len(words) <= 60 and text[0].isupper() and text.endswith("."):
            hidden = [w for w in words if not any(n in w.lower() for n in (*TOPICS, "tensor"))]
            yield " ".join(hidden)


UNSEEN = (
    Unseen(cancer),
    Unseen(orders, 5000),
    Unseen(orders, 500),
    Unseen(digits),
    Unseen(documentation, 5000),
    Unseen(documentation, 500),
)


def written(task: Unseen, folder: Path) -> tuple[Path, dict[str, str]]:
    """The records as a file, and what is said of them on the command line: the shares that are
    public, and that they all are.
    """
    file = folder / f"{task.rows.__name__}{task.train or ''}.csv"
    names, *rows = task.rows()
    np.random.default_rng(7).shuffle(rows)
    share = 0.2
    if task.train:
        rows = rows[: task.train + HELD_OUT]
        share = round(0.5 * (1 - task.train / len(rows)), 3)
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8", newline="") as out:
            csv.writer(out).writerows([names, *rows])
    said = {"data.validation_fraction": share, "data.test_fraction": share, "data.public": "true"}
    return file, {key: str(value) for key, value in said.items()}


def command(*words: str) -> None:
    """Runs quietgrad as it is typed."""
    subprocess.run([sys.executable, "-m", "quietgrad", *words], check=True)


def rule(task: Unseen, epsilon: float, work: Path, results: Path) -> dict[str, Any]:
    """The configuration of ``quietgrad train`` with the data and an epsilon, and its scores."""
    name = f"{task.name}, epsilon {epsilon:g}"
    for line in read(results):
        if line["kind"] == "rule" and line["task"] == name:
            return line
    file, said = written(task, work)
    config = file.with_suffix(".toml")
    if not config.is_file():
        command("init", str(file), "--output", str(config))
    said |= {"privacy.target_epsilon": str(epsilon)}
    run_dir = work / "runs" / name.replace(", ", "-").replace(" ", "-")
    if not (run_dir / "result.json").is_file():
        shutil.rmtree(run_dir, ignore_errors=True)
        said |= {"training.run_dir": str(run_dir), "training.eval_every": "100"}
        command("train", str(config), *(f"--set={key}={value}" for key, value in said.items()))
    used = read_toml(run_dir / "config.toml")
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    keys = (RATE, BATCH, STEPS, NORM)
    settings = {key: used[key.split(".")[0]][key.split(".")[1]] for key in keys}
    base = {"model": used["model"], "data": used["data"] | {"source": file.name}}
    line = {
        "kind": "rule",
        "task": name,
        "settings": settings,
        "trained": result["metrics"],
        "records": result["records"]["train"],
        "base": base | {"privacy": {"target_delta": used["privacy"]["target_delta"]}},
    }
    append(results, line)
    return line


def searched(line: dict[str, Any], epsilon: float, work: Path) -> DefaultsTask:
    """What a search may try: two and a half decades of rates, batches from a thirtieth of the
    records to all of them.
    """
    units = line["records"]
    base = {table: dict(values) for table, values in line["base"].items()}
    base["data"]["source"] = str(work / base["data"]["source"])
    base |= {
        "optimizer": {"name": "adamw"},
        "performance": {"max_physical_batch_size": 512},
        "training": {"device": "cpu"},
    }
    shares = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
    steps = (40, 80, 150, 300, 600)
    return DefaultsTask(
        base,
        epsilon,
        (1e-3, 0.5),
        tuple(max(1, int(units * share)) for share in shares),
        steps,
        max(steps) * units,
        norms=(0.1, 0.3, 1.0, 3.0),
    )


def run(task: Unseen, work: Path, results: Path, trials: int) -> None:
    """All runs of one data set that are not there yet."""
    shared: Trainer | None = None
    for epsilon in EPSILONS:
        line = rule(task, epsilon, work, results)
        name = line["task"]
        trainer = Trainer(name, searched(line, epsilon, work), results)
        if shared is not None:  # what is read and cached is the same at each epsilon
            trainer._runner = shared.runner
        shared = trainer
        for number in range(trials):
            trainer.score(trial(name, trainer.task, number), SEARCH_SEEDS[0])
        for _, _, settings in found(results, name, SEARCH_SEEDS[:1])[:REPEATED]:
            for seed in SEARCH_SEEDS:
                trainer.score(settings, seed)
        for settings in (line["settings"], found(results, name, SEARCH_SEEDS)[0][2]):
            for seed in FRESH_SEEDS:
                trainer.score(settings, seed)


def fresh(results: Path, name: str, settings: Settings) -> tuple[float, float]:
    """Mean validation and test score of settings over the fresh seeds."""
    runs = [x for x in read(results) if x["kind"] == "run" and x["task"] == name]
    runs = [x for x in runs if x["settings"] == settings and x["seed"] in FRESH_SEEDS]
    return tuple(statistics.fmean(x[part] for x in runs) for part in ("validation", "test"))


def report(results: Path) -> None:
    """A Markdown table of what is there."""
    print("| task | N | | rate | batch | steps | norm | validation | test | rule below best |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for line in (x for x in read(results) if x["kind"] == "rule"):
        name = line["task"]
        repeated = found(results, name, SEARCH_SEEDS)
        finished = [settings for *_, settings in found(results, name, FRESH_SEEDS)]
        if not repeated or line["settings"] not in finished or repeated[0][2] not in finished:
            continue
        both = {"search": repeated[0][2], "rule": line["settings"]}
        scores = {which: fresh(results, name, settings) for which, settings in both.items()}
        pairs = zip(scores["search"], scores["rule"], strict=True)
        gap = statistics.fmean(best - ruled for best, ruled in pairs)
        for which, s in both.items():
            cells = [name, line["records"], which, f"{s[RATE]:.3g}", s[BATCH], s[STEPS], s[NORM]]
            cells += [f"{score:.3f}" for score in scores[which]]
            cells += [f"{100 * gap:.1f}" if which == "rule" else ""]
            print(f"| {' | '.join(map(str, cells))} |")


def environment() -> dict[str, Any]:
    """What ran: versions and the kind of machine."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "kind": "environment",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--work", type=Path, default=Path("runs/defaults-unseen"))
    parser.add_argument("--task", action="append", help="one data set alone; may be repeated")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.what == "report":
        report(chosen.results)
        return
    torch.set_num_threads(1)
    now = environment()
    if now not in read(chosen.results):
        append(chosen.results, now)
    for task in UNSEEN:
        if not chosen.task or task.name in chosen.task:
            run(task, chosen.work, chosen.results, chosen.trials)


if __name__ == "__main__":
    main()
