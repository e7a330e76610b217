"""Randomized clipping on long documents: exact norms against Hutch++ with k = 4, 8 and 32 and Hutch
with k = 32, at one epsilon, five seeds.

    apt-get download linux-doc-6.1                       # a Debian 12 package, 37 MB, GPL-2
    dpkg -x linux-doc-6.1_*.deb corpus
    pip install 'quietgrad[demo]'
    python recipes/rc_experiment.py --corpus corpus      # under an hour of one core; resumes
    python recipes/rc_experiment.py --corpus corpus --memory exact    # and the other methods
    python recipes/rc_experiment.py --figure             # docs/rc_experiment.png and a table
    python recipes/rc_experiment.py --corpus corpus --validate '{"learning_rate": 1e-3}'

(The last tries other settings, with exact norms, on validation records.)

Task: which of 17 subsystems a document of the Linux kernel's documentation belongs to (the folder
it lies in; lines that name their own folder are removed). One record is one document, cut at 512
tokens. Test records are declared public and are looked at at the end of a run.

After DP-SGD-RC, sections 6 and appendix D, reduced to what a laptop's processor can do: MiniLM
(22.7 M parameters) instead of Llama-3.2-1B; 512 tokens instead of 4096; what trains is the last
block's feed-forward output layer (1536 x 384), its LayerNorm and the head, above hidden states that
are computed once per record. All methods share hyper-parameters, which were chosen with exact norms
on validation records; as in the paper, that choice is not part of the epsilon. A seed fixes batches
and the directions of the noise for all methods, so differences to exact norms are taken seed by
seed.

Times in the results are processor time of one thread, on a machine that was busy with other work;
benchmarks/ compares times.

Every finished (method, seed) is one line of recipes/results/rc_experiment.jsonl.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import hashlib
import json
import math
import re
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import t as student_t
from torch import Tensor, nn

from quietgrad import Clipping, PrivacyConfig
from quietgrad.plan import PrivateRun
from quietgrad.randomness import RandomKey
from quietgrad.training.tasks.loaded import Tuning
from quietgrad.training.tasks.splits import split
from quietgrad.training.tasks.text.batches import TokenisedTexts, tokenise
from quietgrad.training.tasks.text.data import LabelledTexts
from quietgrad.training.tasks.text.models import PACKAGED_MINILM, load_classifier
from quietgrad.training.tasks.text.pooling import mean_over_tokens

RESULTS = Path(__file__).with_name("results") / "rc_experiment.jsonl"
MEMORY = RESULTS.with_name("rc_memory.json")
FIGURE = Path(__file__).parents[1] / "docs" / "rc_experiment.png"
METHODS = ["exact", "hutch++-4", "hutch++-8", "hutch++-32", "hutch-32"]
REFERENCE = "non-private"
SEEDS = [0, 1, 2, 3, 4]
CLASSES = (
    "clock", "display", "filesystems", "gpio", "hwmon", "i2c", "iio", "input",
    "interrupt-controller", "media", "net", "phy", "pinctrl",
    "power", "regulator", "sound", "usb",
)  # fmt: skip
SAME_SUBSYSTEM = {"networking": "net", "gpu": "display", "fb": "display"}
GENRES = {
    "devicetree",
    "bindings",
    "driver-api",
    "userspace-api",
    "admin-guide",
    "core-api",
    "firmware-guide",
}
GIVES_IT_AWAY = re.compile(r"\$id:|\$schema:|\$ref:|SPDX-License|^%YAML")


@dataclass(frozen=True)
class Settings:
    """The protocol; the same for all methods."""

    max_length: int = 512
    epsilon: float = 2.0
    delta: float = 1e-5
    max_grad_norm: float = 1.0
    batch_size: int = 128
    steps: int = 30
    learning_rate: float = 2e-3
    head_learning_rate: float = 2e-2
    warmup_steps: int = 3
    last_rate: float = 0.05
    micro_batch: int = 16
    validation_fraction: float = 0.1
    test_fraction: float = 0.2


def load_documents(root: Path) -> LabelledTexts:
    """The kernel's documents in English in the folders of the classes, under the ``Documentation``
    that lies somewhere below ``root``.
    """
    found = sorted(root.glob("**/Documentation/devicetree"))
    if not found:
        raise SystemExit(
            f"--corpus {str(root)!r} holds no Documentation/devicetree; see the first lines of "
            "this file"
        )
    base = found[0].parent
    texts, labels = [], []
    for path in sorted(base.rglob("*")):
        name = path.name.removesuffix(".gz")
        folders = [p for p in path.relative_to(base).parts[:-1] if p not in GENRES]
        if (
            name == "index.rst"
            or not name.endswith((".rst", ".txt", ".yaml"))
            or not folders
            or not path.is_file()
        ):
            continue
        label = SAME_SUBSYSTEM.get(folders[0], folders[0])
        if label in CLASSES:
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            lines = raw.decode("utf-8", "replace").splitlines()
            texts.append(
                "\n".join(line for line in lines if not GIVES_IT_AWAY.search(line)).strip()
            )
            labels.append(CLASSES.index(label))
    return LabelledTexts(tuple(texts), np.array(labels, dtype=np.int64), CLASSES, "linux-doc")


class FeedForwardTop(nn.Module):
    """The last block from its feed-forward layer on, and the head: (attention output [b, t, d],
    mask [b, t]) to logits.
    """

    def __init__(self, block: Any, head: nn.Linear) -> None:
        super().__init__()
        self.intermediate = block.intermediate.requires_grad_(False)
        self.output = block.output.requires_grad_(True)
        self.output.dropout.p = 0.0
        self.head = head

    def forward(self, states_btd: Tensor, mask_bt: Tensor) -> Tensor:
        out = self.output(self.intermediate(states_btd), states_btd)
        return self.head(mean_over_tokens(out, mask_bt).to(self.head.weight.dtype))


@dataclass(frozen=True)
class States:
    """What enters the last feed-forward layer, for all records: [tokens of all records, width] in
    bfloat16.
    """

    values: Tensor
    offsets: NDArray[np.int64]
    texts: TokenisedTexts

    def collate(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        batch = self.texts.collate(indices, torch.device("cpu"))
        mask = batch["attention_mask"]
        states = torch.zeros(*mask.shape, self.values.shape[1])
        for row, i in enumerate(indices):
            tokens = self.values[self.offsets[i] : self.offsets[i + 1]]
            states[row, : len(tokens)] = tokens
        return states, mask, batch["labels"]


def compute_states(
    classifier: nn.Module, block: Any, texts: TokenisedTexts, offsets: NDArray[np.int64]
) -> Tensor:
    """One forward pass over every record, sorted by length: what enters the block's feed-forward
    layer, [tokens, width].
    """
    values = torch.empty(int(offsets[-1]), block.output.dense.out_features, dtype=torch.bfloat16)
    caught: list[Tensor] = []
    handle = block.intermediate.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for part in texts.micro_batch_indices(np.arange(len(texts)), 8):
            batch = texts.collate(part, torch.device("cpu"))
            classifier(batch["input_ids"], batch["attention_mask"])
            found = caught.pop()
            for row, i in enumerate(part):
                values[offsets[i] : offsets[i + 1]] = found[row, : len(texts.ids[i])]
    handle.remove()
    return values


@dataclass(frozen=True)
class Task:
    """The records of the three parts, where every run starts from (the pretrained layer and a head
    of zeros), and a digest of all texts.
    """

    train: States
    validation: States
    test: States
    start: FeedForwardTop
    digest: str


def prepare(corpus: Path, settings: Settings, cache: Path) -> Task:
    """Reads the documents and computes their hidden states, or reads those of an earlier call."""
    documents = load_documents(corpus)
    digest = hashlib.sha256("\0".join(documents.texts).encode()).hexdigest()[:16]
    loaded = load_classifier(
        PACKAGED_MINILM, len(CLASSES), Tuning("head"), "mean", attention="eager"
    )
    classifier = cast(Any, loaded.classifier.eval())
    block = classifier.encoder.encoder.layer[-1]
    parts = split(documents, settings.validation_fraction, settings.test_fraction)
    cache.mkdir(parents=True, exist_ok=True)
    states: dict[str, States] = {}
    for name, texts in (
        ("train", parts.train),
        ("validation", parts.validation),
        ("test", parts.test),
    ):
        tokens = tokenise(texts, loaded.tokenizer, settings.max_length)
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in tokens.ids])])
        file = cache / f"rc-{digest}-{settings.max_length}-{name}.pt"
        if not file.exists():
            torch.save(compute_states(classifier, block, tokens, offsets), file)
        states[name] = States(torch.load(file, weights_only=True), offsets, tokens)
    return Task(**states, start=FeedForwardTop(block, classifier.head), digest=digest)


def per_example_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """[examples] cross entropies, in bfloat16 where the processor has it; norms and sums stay in
    float32.
    """
    states, mask, labels = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(states, mask)
    return F.cross_entropy(logits.float(), labels, reduction="none")


def accuracy(model: nn.Module, states: States) -> float:
    right = 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for part in states.texts.micro_batch_indices(np.arange(len(states.texts)), 32):
            values, mask, labels = states.collate(part)
            right += int((model(values, mask).argmax(1) == labels).sum())
    return right / len(states.texts)


def privacy_config(method: str, seed: int, s: Settings) -> PrivacyConfig:
    estimator, _, k = method.rpartition("-") if "hutch" in method else ("exact", "", "32")
    config = PrivacyConfig(
        target_epsilon=s.epsilon, target_delta=s.delta, max_grad_norm=s.max_grad_norm,
        expected_batch_size=s.batch_size, steps=s.steps,
        clipping=Clipping(estimator, int(k)), seed=seed, data_are_public=True,
    )  # fmt: skip
    return (
        replace(config, target_epsilon=None, noise_multiplier=1.0)
        if method == REFERENCE
        else config
    )


def train_once(task: Task, method: str, seed: int, settings: Settings, part: str) -> dict[str, Any]:
    """One run, and its record: accuracy at the end on ``part``, "validation" or "test". The
    reference takes the same batches, without clipping and noise.
    """
    plan = privacy_config(method, seed, settings).build(len(task.train.texts))
    model = copy.deepcopy(task.start).train()
    rates = (settings.learning_rate, settings.head_learning_rate)
    groups = [{"params": part.parameters()} for part in (model.output, model.head)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    seconds: list[float] = []
    started = time.perf_counter()
    public_batches = (plan.sampler.indices(RandomKey.from_seed(seed), t) for t in range(plan.steps))
    with plan.start() as run:
        for step, indices in enumerate(public_batches if method == REFERENCE else run.batches()):
            begun = time.process_time()
            write_gradients(
                None if method == REFERENCE else run, model, task.train, indices, settings
            )
            warm = min(1.0, (step + 1) / (settings.warmup_steps + 1))
            decay = settings.last_rate + (1 - settings.last_rate) * (1 - step / plan.steps)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * warm * decay
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - begun)
    majority = int(np.bincount(task.validation.texts.labels).argmax())
    return {
        "method": method,
        "seed": seed,
        f"{part}_accuracy": accuracy(model, task.validation if part == "validation" else task.test),
        "majority_accuracy": float((task.test.texts.labels == majority).mean()),
        "epsilon": plan.epsilon if method != REFERENCE else None,
        "noise_multiplier": plan.noise_multiplier if method != REFERENCE else None,
        "cpu_seconds_per_step": statistics.fmean(seconds[1:]),  # the first one checks the capture
        "wall_seconds": time.perf_counter() - started,
        "records": [len(s.texts) for s in (task.train, task.validation, task.test)],
        "tokens_median": int(np.median([len(row) for row in task.train.texts.ids])),
        "corpus": task.digest,
        "settings": settings.__dict__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def write_gradients(
    run: PrivateRun | None,
    model: nn.Module,
    train: States,
    batch: NDArray[np.int64],
    settings: Settings,
) -> None:
    """Gradients of one step, micro-batch by micro-batch of similar lengths: clipped, added up and
    released, or plain without a run.
    """
    parts = [*train.texts.micro_batch_indices(batch, settings.micro_batch)] or [
        batch
    ]  # an empty batch counts too
    if run is None:
        for part in parts:
            (per_example_loss(model, train.collate(part)).sum() / settings.batch_size).backward()
        return
    run.backward(model, per_example_loss, map(train.collate, parts))


def status(field: str) -> float:
    """MiB, of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}; memory is measured on Linux alone")


def added_memory(task: Task, method: str, settings: Settings) -> float:
    """MiB that two steps of one batch add to a fresh process, at their peak."""
    plan = privacy_config(method, 0, settings).build(len(task.train.texts))
    model = copy.deepcopy(task.start).train()
    public_batches = (plan.sampler.indices(RandomKey.from_seed(0), t) for t in range(plan.steps))
    with plan.start() as run:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = status("VmRSS")
        batches = public_batches if method == REFERENCE else run.batches()
        for _, indices in zip(range(2), batches, strict=False):
            private = None if method == REFERENCE else run
            write_gradients(private, model, task.train, indices, settings)
            model.zero_grad()
        return status("VmHWM") - before


def read_results() -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Accuracy of every seed with mean and standard deviation, beside the noise multiplier."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by = {m: rows for m in METHODS if (rows := [r for r in results if r["method"] == m])}
    figure, axes = plt.subplots(
        1, 2, figsize=(10, 3.8), layout="constrained", sharey=True, width_ratios=[2, 1]
    )
    for y, (method, rows) in enumerate(by.items()):
        found = [r["test_accuracy"] for r in rows]
        color = "#3a7d44" if method == "exact" else "#c0504d" if "++" in method else "#1f5fa8"
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        axes[0].errorbar(statistics.fmean(found), y, xerr=spread, fmt="D", color=color, capsize=4)
        axes[0].plot(found, [y + 0.22] * len(found), "|", color=color, markersize=9)
        axes[1].barh(y, rows[0]["noise_multiplier"], color=color, height=0.6)
    axes[0].set_yticks(range(len(by)), [m.replace("-", ", k = ") for m in by])
    axes[0].invert_yaxis()
    labels = ("test accuracy: mean, standard deviation, seeds", "noise multiplier")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.25, axis="x")
    s = results[0]["settings"]
    figure.suptitle(
        f"Exact and randomized clipping, epsilon = {s['epsilon']:g}, delta = {s['delta']:.0e}",
        fontsize=11,
    )
    figure.savefig(path, dpi=140)
    plt.close(figure)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; differences to exact norms are means over seeds with 95 % Student intervals."""
    by = {
        m: rows
        for m in [REFERENCE, *METHODS]
        if (rows := {r["seed"]: r for r in results if r["method"] == m})
    }
    exact = by["exact"]
    memory = json.loads(MEMORY.read_text(encoding="utf-8")) if MEMORY.exists() else {}
    heads = ("method", "noise multiplier", "test accuracy", "minus exact", "seconds a step", "MiB")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for method, rows in by.items():
        found = [r["test_accuracy"] for r in rows.values()]
        spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
        pairs = [
            r["test_accuracy"] - exact[seed]["test_accuracy"]
            for seed, r in rows.items()
            if seed in exact
        ]
        difference = ""
        if method not in ("exact", REFERENCE) and len(pairs) > 1:
            half = (
                student_t.ppf(0.975, len(pairs) - 1)
                * statistics.stdev(pairs)
                / math.sqrt(len(pairs))
            )
            difference = f"{statistics.fmean(pairs):+.3f} ± {half:.3f}"
        sigma = next(iter(rows.values()))["noise_multiplier"]
        shown = f"{sigma:.3f}" if sigma is not None else "0"
        seconds = statistics.median(r["cpu_seconds_per_step"] for r in rows.values())
        lines.append(
            f"| {method} | {shown} | {statistics.fmean(found):.3f}{spread} | {difference} | "
            f"{seconds:.2f} | {memory.get(method, float('nan')):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, default=Path("corpus"), help="where the package was unpacked"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/rc_states"), help="hidden states, 1.5 GB"
    )
    parser.add_argument(
        "--figure", action="store_true", help="draw and print what is there, train nothing"
    )
    parser.add_argument(
        "--validate", metavar="JSON", help="settings to try with exact norms; nothing is recorded"
    )
    parser.add_argument(
        "--memory", metavar="METHOD", help="measure what a step of this method adds, and record it"
    )
    arguments = parser.parse_args()
    if arguments.figure:
        draw(read_results(), FIGURE)
        print(table(read_results()))
        return
    settings = Settings(**json.loads(arguments.validate or "{}"))
    task = prepare(arguments.corpus, settings, arguments.cache)
    if arguments.memory:
        known = json.loads(MEMORY.read_text(encoding="utf-8")) if MEMORY.exists() else {}
        known[arguments.memory] = round(added_memory(task, arguments.memory, settings), 1)
        MEMORY.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{arguments.memory}: {known[arguments.memory]} MiB")
        return
    if arguments.validate:
        print(json.dumps(train_once(task, "exact", 1000, settings, "validation")))
        return
    if others := {r["corpus"] for r in read_results()} - {task.digest}:
        raise SystemExit(
            f"{RESULTS} holds results of other documents ({', '.join(sorted(others))}; these are "
            f"{task.digest}): differences between methods would be differences between documents. "
            "Unpack the package that they were made with, or move the file away."
        )
    done = {(r["method"], r["seed"]) for r in read_results()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for method, seed in [*((m, s) for s in SEEDS for m in METHODS), (REFERENCE, SEEDS[0])]:
        if (method, seed) in done:
            continue
        record = train_once(task, method, seed, settings, "test")
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"{method} {seed}: {record['test_accuracy']:.3f} in {record['wall_seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
