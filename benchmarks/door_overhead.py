"""What ``run.loader`` (without and with workers), ``PrivateTrainer`` and ``PrivateLightningModule``
cost over the bare loop, a step each in turn.

    python benchmarks/door_overhead.py [--rounds 30] [--thin-rounds 200] [--shapes bert-32 thin]
                                       [--output benchmarks/results/door_overhead.json]

The bare loop is ``run.batches()``, ``run.backward`` on tensors that were stacked by hand, and the
optimiser's step. Every door trains the model of ``clipping_peers.py`` with that loss and seed and
a ledger, in a process that lives through all rounds; since the seed is one, a round's batches are
the same records everywhere. A step is all that happens from the end of one to the end of the next:
drawing, reading, collating, clipping, noise, the optimiser, callbacks and progress.

Reported are ratios to the bare loop's step of the same round, by the clock and by the processor
time of the process and its workers (which a loaded machine blurs less): medians and quartiles over
rounds, and the ends of a 95 % interval of the median. "bare again" is a second bare loop, what
chance makes of such a ratio. "thin" is the same model with as many tensors, each 32 times narrower:
what a door adds stands out there, and over the step of bert-32 it is the share that "extra over
bert-32" gives, more sharply than the ratio does. "around" is sharper still: processor time of a
step outside of clipping, noise and the optimiser, which are the same work at every door, less that
of the bare loop, as a share of the bare loop's step. Workers read ahead while other doors have
their turn, so their clock says what is left where reading is hidden behind steps; their processor
time is counted in the step after it.

Target: less than 2 % of a step of bert-32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from turns import STEP_LIMIT_SECONDS, Worker
from two_commits import quartiles

from quietgrad import PrivacyConfig
from quietgrad.clipping.bound import BoundClipper
from quietgrad.plan.run import PrivateRun

TARGET = 0.02
RECORDS, LENGTH, EXPECTED, PHYSICAL = 2000, 32, 48, 64  # most steps are one forward pass
WIDTHS = {"bert-32": 384, "thin": 12}
WARM_UP = 4
MOST_STEPS = 1000
PACKAGES = ("torch", "transformers", "accelerate", "lightning")

Told = Callable[[], None]  # called at the end of every step


def bert(shape: str) -> nn.Module:
    """``clipping_peers.bert``, and the same with narrow layers."""
    import transformers as hf

    torch.manual_seed(0)
    width = WIDTHS[shape]
    return hf.BertForSequenceClassification(
        hf.BertConfig(
            vocab_size=30522 * width // 384,
            hidden_size=width,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=4 * width,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
    )


def records() -> dict[str, Tensor]:
    """[records, length] words, and classes."""
    torch.manual_seed(1)
    ids = torch.randint(5, 900, (RECORDS, LENGTH))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, 3, (RECORDS,)),
    }


def one_by_one() -> list[dict[str, Tensor]]:
    stacked = records()
    return [{name: rows[i] for name, rows in stacked.items()} for i in range(RECORDS)]


def per_example_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits.float(), batch["labels"], reduction="none")


def privacy() -> PrivacyConfig:
    return PrivacyConfig(
        noise_multiplier=1.0,
        expected_batch_size=EXPECTED,
        steps=MOST_STEPS,
        seed=1,
        data_are_public=True,
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)


def bare(shape: str, folder: str, told: Told) -> None:
    model, stacked = bert(shape).train(), records()
    optimizer = adamw(model)

    def micro_batches(indices: Any) -> Iterator[dict[str, Tensor]]:
        for i in range(0, max(len(indices), 1), PHYSICAL):
            chosen = torch.from_numpy(indices[i : i + PHYSICAL])
            yield {name: rows[chosen] for name, rows in stacked.items()}

    with privacy().build(RECORDS).start(f"{folder}/ledger.jsonl") as run:
        for indices in run.batches():
            run.backward(model, per_example_loss, micro_batches(indices))
            optimizer.step()
            optimizer.zero_grad()
            told()


def loader(shape: str, folder: str, told: Told, workers: int = 0) -> None:
    model = bert(shape).train()
    optimizer = adamw(model)
    with privacy().build(RECORDS).start(f"{folder}/ledger.jsonl") as run:
        batches = run.loader(
            one_by_one(),
            physical_batch_size=PHYSICAL,
            num_workers=workers,
            persistent_workers=bool(workers),
        )
        for _ in run.epochs():
            for batch in batches:
                run.backward(model, per_example_loss, batch)
                optimizer.step()
                optimizer.zero_grad()
                told()


def trainer(shape: str, folder: str, told: Told) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from quietgrad.integrations.transformers import PrivateTrainer

    class Tells(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            told()

    PrivateTrainer(
        model=bert(shape),
        args=TrainingArguments(
            folder,
            per_device_train_batch_size=PHYSICAL,
            learning_rate=1e-4,
            optim="adamw_torch",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=one_by_one(),
        callbacks=[Tells()],
        privacy=privacy(),
    ).train()


def lightning(shape: str, folder: str, told: Told) -> None:
    from lightning import Trainer
    from lightning.pytorch import Callback

    from quietgrad.integrations.lightning import PrivateLightningModule

    class Module(PrivateLightningModule):
        def __init__(self) -> None:
            super().__init__(privacy=privacy())
            self.net = bert(shape)

        def per_example_loss(self, batch: Any) -> Tensor:
            return per_example_loss(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    class Tells(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            told()

    data = torch.utils.data.DataLoader(one_by_one(), batch_size=PHYSICAL)  # type: ignore[arg-type]
    Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[Tells()],
    ).fit(Module(), data)


DOORS: dict[str, Callable[[str, str, Told], None]] = {
    "bare": bare,
    "bare again": bare,
    "loader": loader,
    "loader, 2 workers": partial(loader, workers=2),
    "PrivateTrainer": trainer,
    "PrivateLightningModule": lightning,
}


class Stop(Exception):
    """The other side has seen enough."""


def timed(method: Any, spent: list[float]) -> Any:
    """The method; its processor seconds are added up."""

    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        before = time.process_time()
        try:
            return method(*args, **options)
        finally:
            spent[0] += time.process_time() - before

    return call


def seconds_of_workers() -> float:
    """Processor time of the loader's processes so far, by Linux's scheduler."""
    total = 0.0
    for child in multiprocessing.active_children():
        for task in Path(f"/proc/{child.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has just ended
                total += int(task.read_text().split()[0]) * 1e-9
    return total


def worker(shape: str, door: str) -> None:
    """The other side of ``turns.Worker``: one JSON line a step, and not a step more than
    is asked for.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    warnings.simplefilter("ignore")
    begun: list[float] = []

    common = [0.0]  # processor seconds of the step so far that every door spends
    for owner, name in ((BoundClipper, "clip"), (PrivateRun, "release")):
        setattr(owner, name, timed(getattr(owner, name), common))
    update = timed(AdamW.step, common)

    def step(optimizer: Any, closure: Any = None) -> Any:
        """Lightning's closure is the rest of the step, and no part of the update."""
        if closure is None:
            return update(optimizer)
        with torch.enable_grad():
            loss = closure()
        update(optimizer)
        return loss

    AdamW.step = step  # type: ignore[method-assign]
    read: list[float] = [0.0]  # processor seconds of workers, up to the step before

    def wait() -> None:
        if not sys.stdin.readline():
            raise Stop
        common[0] = 0.0
        begun[:] = [time.perf_counter(), time.process_time()]

    def told() -> None:
        seconds, cpu = time.perf_counter() - begun[0], time.process_time() - begun[1]
        before, read[0] = read[0], seconds_of_workers()
        cpu += max(0.0, read[0] - before)
        taken = {"seconds": seconds, "cpu": cpu, "around": cpu - common[0]}
        answers.write(json.dumps(taken) + "\n")
        answers.flush()
        wait()

    try:
        with tempfile.TemporaryDirectory() as folder:
            wait()
            DOORS[door](shape, folder, told)
    except Stop:
        pass
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()


def steps_of(shape: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Rounds of one step each, in an order drawn anew."""
    workers = {
        door: Worker(shape, door, script=Path(__file__), environment=dict(os.environ))
        for door in DOORS
    }
    taken: dict[str, list[dict[str, float]]] = {door: [] for door in DOORS}
    order, shuffled = list(DOORS), random.Random(0)
    try:
        for round_ in range(-WARM_UP, rounds):  # the first steps load, trace, check and fill caches
            shuffled.shuffle(order)
            for door in order:
                if workers[door].step() is None:
                    raise SystemExit(f"{shape}, {door}: {workers[door].error}")
                if round_ >= 0:
                    taken[door].append(workers[door].answer)
    finally:
        for one in workers.values():
            one.end()
    return taken


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles, and order statistics between which the median lies with 95 %."""
    ordered, n = sorted(values), len(values)
    chances = [math.comb(n, k) / 2**n for k in range(n + 1)]
    below = next((k for k in range(n) if sum(chances[: k + 1]) > 0.025), 0)
    return {
        **quartiles(values),
        "median_low": ordered[max(below - 1, 0)],
        "median_high": ordered[min(n - below, n - 1)],
    }


def compared(taken: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Each door against the bare loop, round by round."""
    base = taken["bare"]
    entry: dict[str, Any] = {}
    for door, steps in taken.items():
        row: dict[str, Any] = {
            "milliseconds": 1000 * statistics.median(step["seconds"] for step in steps),
            "processor_milliseconds": 1000 * statistics.median(step["cpu"] for step in steps),
        }
        if door != "bare":
            for name, key in (("clock", "seconds"), ("processor", "cpu")):
                row[name] = spread([s[key] / b[key] for s, b in zip(steps, base)])
            whole = statistics.median(step["cpu"] for step in base)
            row["around"] = spread(
                [(s["around"] - b["around"]) / whole for s, b in zip(steps, base)]
            )
            extra = [1000 * (s["cpu"] - b["cpu"]) for s, b in zip(steps, base)]
            row["extra_processor_milliseconds"] = spread(extra)
        entry[door] = row
    return entry


def add_shares(shapes: dict[str, Any]) -> None:
    """What a door adds to a thin step, as a share of a step of bert-32."""
    if not {"bert-32", "thin"} <= shapes.keys():
        return
    whole = shapes["bert-32"]["doors"]["bare"]["processor_milliseconds"]
    for door, row in shapes["thin"]["doors"].items():
        if door != "bare":
            extra = row["extra_processor_milliseconds"]
            row["extra_over_bert-32"] = {name: ms / whole for name, ms in extra.items()}


def show(shape: str, doors: dict[str, Any]) -> None:
    for door, row in doors.items():
        told = f"{shape:8s} {door:24s} {row['milliseconds']:8.1f} ms"
        for name in ("clock", "processor", "around", "extra_over_bert-32"):
            if name in row:
                r = row[name]
                told += f"  {name} {r['median']:.4f} [{r['median_low']:.4f}-{r['median_high']:.4f}]"
        print(told, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="of bert-32")
    parser.add_argument("--thin-rounds", type=int, default=200)
    parser.add_argument("--shapes", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/door_overhead.json")
    )
    parser.add_argument("--worker", nargs=2, metavar=("SHAPE", "DOOR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    if min(arguments.rounds, arguments.thin_rounds) < 2:
        parser.error("quartiles need at least 2 rounds")  # before they are run
    report: dict[str, Any] = {
        "target": TARGET,
        "records_a_step": EXPECTED,
        "length": LENGTH,
        "environment": {
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "step_limit_seconds": STEP_LIMIT_SECONDS,
            **{name: version(name) for name in PACKAGES},
        },
        "shapes": {},
    }
    for shape in arguments.shapes:
        load = round(os.getloadavg()[0], 2)
        rounds = arguments.thin_rounds if shape == "thin" else arguments.rounds
        doors = compared(steps_of(shape, rounds))
        report["shapes"][shape] = {
            "rounds": rounds,
            "load_at_start": load,
            "load_at_end": round(os.getloadavg()[0], 2),
            "doors": doors,
        }
        add_shares(report["shapes"])
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        show(shape, report["shapes"][shape]["doors"])


if __name__ == "__main__":
    main()
