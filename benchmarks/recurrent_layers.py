"""Time of clipping for recurrent layers, attention and bags of words against the non-private step
and Opacus' own layers, interleaved in one run.

    [OMP_NUM_THREADS=1] python benchmarks/recurrent_layers.py [--rounds 15] [--layers ...]
        [--output benchmarks/results/recurrent_layers.json]

Every method ends with a gradient (non-private) or a clipped sum of the same model, one layer and a
linear head, on the same batch. Opacus cannot differentiate torch's own layers by example; it is
measured with its replacements (DPLSTM, DPGRU, DPRNN, DPMultiheadAttention), which hold the same
weights' shapes; its embedding table takes the bag's place as a mean of looked-up rows. A round
takes one step of each method in an order drawn anew. Reported are medians and quartiles, over
rounds, of ratios to the non-private step of the same round. The first three steps of each method
are not counted: they trace, examine and allocate.

Needs the dev extra.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper

Step = Callable[[], Any]
WARM_UP = 3


@dataclass(frozen=True)
class Setting:
    """One layer of ``width`` cells (or features) on [batch, length, width] inputs."""

    kind: str
    batch: int
    length: int
    width: int


SETTINGS = {
    f"{kind}-{name}": Setting(kind, *sizes)
    for name, sizes in {"64x32x128": (64, 32, 128), "32x64x256": (32, 64, 256)}.items()
    for kind in ("lstm", "gru", "rnn")
}
SETTINGS |= {
    "lstm-2-two-way-32x64x128": Setting("lstm-2", 32, 64, 128),
    "gru-2-two-way-32x64x128": Setting("gru-2", 32, 64, 128),
    "attention-64x32x256": Setting("attention", 64, 32, 256),
    "attention-32x128x256": Setting("attention", 32, 128, 256),
    "bag-64x20x32": Setting("bag", 64, 20, 32),
}
WORDS = 200_000


class Model(nn.Module):
    """A layer and a linear head on the mean of its outputs."""

    def __init__(self, kind: str, layer: nn.Module, out: int) -> None:
        super().__init__()
        self.kind, self.layer, self.head = kind, layer, nn.Linear(out, 10)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "bag":
            found = self.layer(x)
            return self.head(found if found.dim() == 2 else found.mean(1))
        found = self.layer(x, x, x) if self.kind == "attention" else self.layer(x)
        return self.head(found[0].mean(1))


def build(setting: Setting, opacus: bool) -> Model:
    torch.manual_seed(0)
    kind, width = setting.kind, setting.width
    if kind == "bag":
        bag = nn.Embedding(WORDS, width) if opacus else nn.EmbeddingBag(WORDS, width)
        return Model(kind, bag, width)
    from opacus import layers

    kinds: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
        "lstm": (nn.LSTM, layers.DPLSTM),
        "gru": (nn.GRU, layers.DPGRU),
        "rnn": (nn.RNN, layers.DPRNN),
    }
    if kind == "attention":
        attention = layers.DPMultiheadAttention if opacus else nn.MultiheadAttention
        return Model(kind, attention(width, 8, batch_first=True), width)
    plain, private = kinds[kind.partition("-")[0]]
    deep = {"num_layers": 2, "bidirectional": True} if kind.endswith("-2") else {}
    layer = (private if opacus else plain)(width, width, batch_first=True, **deep)
    return Model(kind, layer, 2 * width if deep else width)


def batch_for(setting: Setting) -> dict[str, Tensor]:
    torch.manual_seed(1)
    shape = (setting.batch, setting.length)
    x = torch.randint(0, WORDS, shape) if setting.kind == "bag" else None
    return {
        "x": torch.randn(*shape, setting.width) if x is None else x,
        "y": torch.randint(0, 10, (setting.batch,)),
    }


def per_example_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def non_private(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    def step() -> None:
        model.zero_grad()
        per_example_loss(model, batch).mean().backward()

    return step


def quietgrad(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    bound = Clipper(1.0).bind(model, per_example_loss)
    # No guarded release: the first call alone is examined.
    return lambda: bound.clip(batch, step=2)


def opacus(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model.train(), batch_first=True, strict=False)
    parameters = list(model.parameters())

    def step() -> None:
        wrapped.zero_grad()
        per_example_loss(wrapped, batch).mean().backward()
        each = [p.grad_sample for p in parameters]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each], 1).norm(dim=1)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for p, g in zip(parameters, each, strict=True):
            p.grad = torch.einsum("b,b...->...", factors, g)
            p.grad_sample = None

    return step


METHODS: dict[str, Callable[[nn.Module, dict[str, Tensor]], Step]] = {
    "non-private": non_private,
    "quietgrad": quietgrad,
    "opacus": opacus,
}


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    batch, steps, failed = batch_for(setting), {}, {}
    for name, method in METHODS.items():
        try:
            step = method(build(setting, opacus=name == "opacus"), batch)
            for _ in range(WARM_UP):
                step()
            steps[name] = step
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            started = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - started)
    base = seconds["non-private"]
    report: dict[str, Any] = {
        "seconds_non_private": statistics.median(base),
        "load_at_end": round(os.getloadavg()[0], 2),
        "failed": failed,
        "time_ratio": {},
    }
    for name, values in seconds.items():
        if name != "non-private":
            ratios = [mine / plain for mine, plain in zip(values, base, strict=True)]
            first, median, third = statistics.quantiles(ratios, n=4)
            report["time_ratio"][name] = {"median": median, "quartiles": [first, third]}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/recurrent_layers.json")
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "opacus": version("opacus"),
        },
        "rounds": arguments.rounds,
        "layers": {},
    }
    # Small layers are at the mercy of how threads wait for each other: runs with one and with
    # several stand side by side.
    reports: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        reports = json.loads(arguments.output.read_text(encoding="utf-8"))
    reports[f"{torch.get_num_threads()} threads"] = report
    for name in arguments.layers:
        setting = SETTINGS[name]
        found = report["layers"][name] = vars(setting) | measure(setting, arguments.rounds)
        arguments.output.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
        print(f"{name:26s} {1e3 * found['seconds_non_private']:8.1f} ms", end="")
        for method, row in found["time_ratio"].items():
            low, high = row["quartiles"]
            print(f"   {method} {row['median']:.2f} [{low:.2f}-{high:.2f}]", end="")
        print("  ", *found["failed"].values(), flush=True)


if __name__ == "__main__":
    main()
