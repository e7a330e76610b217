"""How little exact clipping can cost: a step written by hand for one model, beside the library's.

    python benchmarks/step_by_hand.py [--repeats 7] [--launches 3] [--regimes bert-32 ...] [--check]

Two steps, both of autograd and a few products alone: no bounds on rounding, no guard, no records
that are padded, no user's hooks, nothing that is found out about a model.

- ``one by one`` (any model): each example's gradient by autograd, its length, its weighted sum.
- ``together`` (BERT): inputs and output gradients are kept, a layer's squared lengths are inner
  products of two Gram matrices, its weighted sum is one product.

What they take over the step without privacy is what the arithmetic asks of this machine; what the
library takes over the faster of them is what soundness and generality cost. Models, batches and the
way of timing are those of clipping_peers.py, whose planner's choice of micro-batch the second step
takes over (--parts). Two processes of the same code differ by several per cent for as long as they
live: all are launched anew several times, and medians are those of the launches' medians.
``--check`` compares the clipped sums with the library's. Writes
benchmarks/results/step_by_hand.json, regime by regime.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from clipping_peers import (
    Batch,
    build,
    measure_time,
    non_private,
    per_example_loss,
    quietgrad_exact,
    trainable,
)
from torch import Tensor, nn
from turns import Step, Worker, answer_steps

OUTPUT = Path(__file__).parent / "results" / "step_by_hand.json"
REGIMES = ["bert-32", "llama-512", "llama-lora", "resnet18-gn", "bert-128"]
LIMIT = 1.0
Sums = dict[str, Tensor]


def one_by_one(model: nn.Module, batch: Batch) -> Callable[[], Sums]:
    names, parameters = list(trainable(model)), list(trainable(model).values())

    def step() -> Sums:
        sums: list[Tensor] = []
        for i in range(len(batch["y"])):
            loss = per_example_loss(model, {name: x[i : i + 1] for name, x in batch.items()})
            gradients = list(torch.autograd.grad(loss.sum(), parameters))
            length = float(torch.stack(torch._foreach_norm(gradients)).norm())
            factor = min(1.0, LIMIT / length)
            if sums:
                torch._foreach_add_(sums, gradients, alpha=factor)
            else:
                torch._foreach_mul_(gradients, factor)
                sums = gradients
        return dict(zip(names, sums, strict=True))

    return step


@dataclass
class Kept:
    """Of one layer's call: [b, ...] what it was given and the gradient at what it returned."""

    layer: nn.Module
    given: Tensor
    gradient: Tensor


def together(model: nn.Module, batch: Batch, parts: int) -> Callable[[], Sums]:
    """For models of linear layers, layer norms and embeddings, each called once."""
    kinds = (nn.Linear, nn.LayerNorm, nn.Embedding)
    names = {m: name for name, m in model.named_modules() if isinstance(m, kinds)}
    kept: list[Kept] = []

    def keep(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if isinstance(layer, nn.Embedding):
            output = output.detach().requires_grad_()
        given = args[0].detach()
        output.register_hook(lambda gradient: kept.append(Kept(layer, given, gradient)))
        return output

    for layer in names:
        layer.register_forward_hook(keep)
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def step() -> Sums:
        sums: Sums = {}
        size = -(-len(batch["y"]) // parts)
        for start in range(0, len(batch["y"]), size):
            part = {name: x[start : start + size] for name, x in batch.items()}
            kept.clear()
            per_example_loss(model, part).sum().backward()
            squared = torch.zeros(len(part["y"]))
            for one in kept:
                squared += squares_of(one)
            factors = (LIMIT / squared.sqrt()).clamp(max=1.0)
            for one in kept:
                add_weighted(sums, names[one.layer], one, factors)
        return sums

    return step


def squares_of(one: Kept) -> Tensor:
    """[b] of the gradients of a layer's weight and bias."""
    x, g = one.given, one.gradient
    if isinstance(one.layer, nn.Embedding):
        x = x.expand(len(g), -1)
        same = (x.unsqueeze(2) == x.unsqueeze(1)).float()
        return (same * (g @ g.mT)).sum((1, 2))
    if isinstance(one.layer, nn.LayerNorm):
        scale, shift = scale_and_shift(one)
        return scale.square_().sum(1) + shift.square().sum(1)
    if x.dim() == 2:
        return (x.square().sum(1) + 1.0) * g.square().sum(1)
    return ((x @ x.mT).add_(1.0).mul_(g @ g.mT)).sum((1, 2))


def scale_and_shift(one: Kept) -> tuple[Tensor, Tensor]:
    """[b, d] gradients of a layer norm's parameters."""
    layer = one.layer
    assert isinstance(layer, nn.LayerNorm)
    shape, eps = layer.normalized_shape, layer.eps
    normalised, _, _ = torch.native_layer_norm(one.given, shape, None, None, eps)
    return normalised.mul_(one.gradient).sum(1), one.gradient.sum(1)


def add_weighted(sums: Sums, name: str, one: Kept, factors: Tensor) -> None:
    x, g = one.given, one.gradient

    def add(of: str, part: Tensor) -> None:
        known = sums.get(f"{name}.{of}")
        sums[f"{name}.{of}"] = part if known is None else known.add_(part)

    if isinstance(one.layer, nn.LayerNorm):
        for of, each in zip(("weight", "bias"), scale_and_shift(one), strict=True):
            add(of, factors @ each)
        return
    weighted = g * factors.view(-1, *[1] * (g.dim() - 1))
    rows = weighted.flatten(0, -2)
    if isinstance(one.layer, nn.Embedding):
        key = f"{name}.weight"
        if key not in sums:
            sums[key] = torch.zeros_like(one.layer.weight)
        sums[key].index_add_(0, x.expand(g.shape[:2]).reshape(-1), rows)
        return
    key = f"{name}.weight"
    if key in sums:
        sums[key].addmm_(rows.T, x.flatten(0, -2))
    else:
        sums[key] = rows.T @ x.flatten(0, -2)
    add("bias", rows.sum(0))


def by_hand(regime: str, method: str, parts: int) -> Callable[[], Sums]:
    model, batch = build(regime)
    return together(model, batch, parts) if method == "together" else one_by_one(model, batch)


def step_of(regime: str, method: str, parts: int) -> Step:
    if method in ("one by one", "together"):
        return by_hand(regime, method, parts)
    model, batch = build(regime)
    return (non_private if method == "non-private" else quietgrad_exact)(model, batch)


def methods_of(regime: str) -> list[str]:
    hand = ["together"] if regime.startswith("bert") else []
    few = len(build(regime)[1]["y"]) <= 16  # else one by one takes several times the plain step
    return ["non-private", "quietgrad", *hand, *(["one by one"] if few or not hand else [])]


def check(regime: str, parts: int) -> None:
    """Raises where a step by hand is another than the library's."""
    model, batch = build(regime)
    sums = quietgrad_exact(model, batch)().gradients
    length = float(torch.stack([g.norm() for g in sums.values()]).norm())
    for method in methods_of(regime)[2:]:
        found = by_hand(regime, method, parts)()
        away = [float((found[name] - g).norm()) for name, g in sums.items()]
        off = float(torch.tensor(away).norm()) / length
        print(f"{regime:12} {method:12} differs from the library's sum by {off:.1e}", flush=True)
        if off > 2e-3:  # the library enlarges lengths by up to 1e-3
            raise SystemExit("a step by hand that computes something else is no limit")


def launched(regime: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """``measure_time`` of new processes."""
    return measure_time(
        regime,
        methods_of(regime),
        arguments.repeats,
        lambda regime, method: Worker(
            regime, method, Path(__file__), options=["--parts", str(arguments.parts)]
        ),
    )


def of_launches(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over launches, and the range over all rounds."""
    failed = [f"{method}: {why}" for one in each for method, why in one["failed"].items()]
    if failed:
        raise SystemExit("\n".join(failed))
    methods = {}
    for method in each[0]["methods"]:
        ratios = [one["methods"][method]["time_ratio"] for one in each]
        medians = [ratio["median"] for ratio in ratios]
        methods[method] = {
            "time_ratio": {
                "median": statistics.median(medians),
                "min": min(ratio["min"] for ratio in ratios),
                "max": max(ratio["max"] for ratio in ratios),
            },
            "medians_of_launches": medians,
        }
    plain = statistics.median(one["seconds_non_private"] for one in each)
    return {"seconds_non_private": plain, "methods": methods}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds of a launch")
    parser.add_argument("--launches", type=int, default=3, help="of all processes")
    parser.add_argument("--regimes", nargs="+", default=REGIMES, help="of clipping_peers.py")
    parser.add_argument("--parts", type=int, default=2, help="micro-batches of the step together")
    parser.add_argument("--check", action="store_true", help="compare sums, time nothing")
    parser.add_argument("--worker", nargs=2, metavar=("REGIME", "METHOD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        answer_steps(lambda: step_of(*arguments.worker, arguments.parts))
        return
    if arguments.check:
        for regime in arguments.regimes:
            check(regime, arguments.parts)
        return
    environment = {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    record: dict[str, Any] = {"regimes": {}}
    with contextlib.suppress(FileNotFoundError):
        record = json.loads(OUTPUT.read_text(encoding="utf-8"))
    for regime in arguments.regimes:
        found = {
            "started": datetime.now(timezone.utc).isoformat(timespec="minutes"),
            "load_at_start": os.getloadavg()[0],
            "environment": environment,
            "repeats": arguments.repeats,
            "launches": arguments.launches,
        }
        found |= of_launches([launched(regime, arguments) for _ in range(arguments.launches)])
        record["regimes"][regime] = found
        for method, row in found["methods"].items():
            ratio = row["time_ratio"]
            print(
                f"{regime:12} {method:12} {ratio['median']:.3f} "
                f"[{ratio['min']:.3f}-{ratio['max']:.3f}]",
                flush=True,
            )
        OUTPUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
