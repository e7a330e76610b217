"""Time and memory of clipping against the non-private step and against peers, interleaved in one
run.

    python benchmarks/clipping_peers.py [--repeats 7] [--regimes bert-32 llama-512 ...] [--methods
    quietgrad ...] [--again]
                                        [--another] [--output
                                        benchmarks/results/clipping_peers.json]

Every method runs forward and backward of the same model on the same batch and ends with a gradient
(non-private) or a clipped sum. Each lives in a process of its own, since peers leave hooks and
patches behind; the processes take one step each in turn, and ratios are to the non-private step of
the same round: median and range over rounds, and the median of processor time, which a busy machine
moves less. A method slower than 20 non-private steps gets two
rounds. Memory is the peak resident memory that a fresh process adds over model and data in two
steps (Linux). A method that fails is reported with its error; memory that a process may take is
limited, and running into the limit counts as a failure.

Results are written after each regime. A regime that the output file holds already, measured with
the same packages, methods and at least as many rounds, is not measured again unless --again is
given. A machine has better and worse hours: --another adds a run of now to those that the file
holds, and what is reported are medians over runs of their medians, and the range over all rounds.

Needs the dev and hf extras. Opake is compared where it is installed; it asks for newer packages
than the rest, so put it beside them and in PYTHONPATH: pip install --no-deps --target FOLDER
opake-engine==0.16.1 opake-base==0.16.1 opake-dpsgd==0.16.1 opake-patches==0.16.1
opake-accounting==0.16.1 optree
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import Step, Worker, added_mib, answer_steps, limit_memory

Batch = dict[str, Tensor]

SLOW = 20.0  # non-private steps
ROUNDS_OF_SLOW = 2
PACKAGES = ("torch", "opacus", "transformers", "peft", "opake-engine")


@dataclass(frozen=True)
class Regime:
    model: str
    batch: int
    length: int = 0
    limit_gib: float = 14.0  # of memory, for each process


REGIMES = {
    "bert-32": Regime("bert", 64, 32),
    "llama-512": Regime("llama", 2, 512),
    "llama-1024": Regime("llama", 2, 1024),
    "llama-4096": Regime("llama", 2, 4096, limit_gib=8.0),
    "resnet18-gn": Regime("resnet", 64),
    "llama-lora": Regime("llama-lora", 2, 512),
    "bert-128": Regime("bert", 16, 128),
    # Hard ones: seconds to tens of seconds a step on two processors.
    "bert-512": Regime("bert", 8, 512),
    "bert-256x64": Regime("bert", 256, 64),
    "gpt2-tied-512": Regime("gpt2", 4, 512),
    "vit-b": Regime("vit", 32),
}
NOT_MEASURED = {
    "fastdp": "not on PyPI (the package fast-dp there is another thing)",
    "dp-transformers": "clips with Opacus' hooks, which are measured",
}


def build(regime: str) -> tuple[nn.Module, Batch]:
    spec = REGIMES[regime]
    torch.manual_seed(0)
    b, t = spec.batch, spec.length
    if spec.model == "resnet":
        return ResNet18(), {"x": torch.randn(b, 3, 32, 32), "y": torch.randint(0, 10, (b,))}
    if spec.model == "vit":
        return vit(), {"pixel_values": torch.randn(b, 3, 224, 224), "y": torch.randint(0, 10, (b,))}
    ids = torch.randint(5, 4000, (b, t))
    if spec.model == "bert":
        # Opacus cannot broadcast BERT's default position ids, so they are given to all.
        positions = torch.arange(t).expand(b, t).contiguous()
        return bert(), {
            "input_ids": ids,
            "position_ids": positions,
            "token_type_ids": torch.zeros_like(ids),
            "y": torch.randint(0, 3, (b,)),
        }
    if spec.model == "gpt2":
        return gpt2(), {"input_ids": ids, "y": ids}
    model = llama()
    return (with_lora(model) if spec.model == "llama-lora" else model), {"input_ids": ids, "y": ids}


def bert() -> nn.Module:
    """The shape of MiniLM, 22.7 million parameters."""
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return hf.BertForSequenceClassification(config)


def llama() -> nn.Module:
    """A small Llama, 17.8 million parameters."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=4096, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
        intermediate_size=1536, max_position_embeddings=4096,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """The shape of GPT-2, 124 million parameters: one table embeds tokens and predicts them."""
    import transformers as hf

    config = hf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return hf.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    """The shape of ViT-B/16, 86 million parameters, images of 224 x 224."""
    import transformers as hf

    return hf.ViTForImageClassification(hf.ViTConfig(num_labels=10))


def with_lora(model: nn.Module) -> nn.Module:
    """Adapters of rank 16 on every linear layer of the blocks, both factors random so that no
    gradient is zero; the rest is frozen.
    """
    import peft

    config = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.GroupNorm(32, out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.GroupNorm(32, out),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.GroupNorm(32, out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class ResNet18(nn.Sequential):
    """ResNet-18 for small images, with group normalisation: 11.2 million parameters."""

    def __init__(self, classes: int = 10) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 3, 1, 1, bias=False),
            nn.GroupNorm(32, 64),
            nn.ReLU(),
        ]
        channels = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [ResidualBlock(channels, width, stride), ResidualBlock(width, width, 1)]
            channels = width
        super().__init__(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )


def per_example_loss(model: nn.Module, batch: Batch) -> Tensor:
    if "x" in batch:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    logits = model(**{k: v for k, v in batch.items() if k != "y"}).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, batch["y"], reduction="none")
    return F.cross_entropy(
        logits[:, :-1].transpose(1, 2), batch["y"][:, 1:], reduction="none"
    ).mean(1)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def non_private(model: nn.Module, batch: Batch) -> Step:
    def step() -> None:
        model.zero_grad()
        per_example_loss(model, batch).mean().backward()

    return step


def planners_choice() -> Any:
    """What a user gets who asks for exact clipping and nothing else."""
    from quietgrad.clipping import Clipper

    return Clipper(1.0, "auto")


def quietgrad_exact(model: nn.Module, batch: Batch) -> Step:
    bound = planners_choice().bind(model, per_example_loss)
    return lambda: bound.clip(
        batch, step=2
    )  # not a guarded release: the first call alone is examined


def quietgrad_hutch(model: nn.Module, batch: Batch) -> Step:
    from quietgrad.clipping import Clipper

    bound = Clipper(1.0, "hutch").bind(model, per_example_loss)
    return lambda: bound.clip(
        batch, step=2
    )  # not a guarded release: the first call alone is examined


def opacus_hooks(model: nn.Module, batch: Batch) -> Step:
    from opacus import GradSampleModule

    model.train()
    wrapped = GradSampleModule(model, strict=False)
    parameters = list(trainable(model).values())

    def step() -> None:
        wrapped.zero_grad()
        per_example_loss(wrapped, batch).mean().backward()
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters], 1).norm(
            dim=1
        )
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for p in parameters:
            p.grad = torch.einsum("b,b...->...", factors, p.grad_sample)
            p.grad_sample = None

    return step


def opacus_two_passes(model: nn.Module, batch: Batch, ghost: bool) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    model.train()
    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=ghost, strict=False
    )

    def step() -> None:
        wrapped.zero_grad()
        wrapped.enable_hooks()
        losses = per_example_loss(wrapped, batch)
        losses.mean().backward(retain_graph=True)
        factors = wrapped.get_clipping_coef().detach()
        wrapped.zero_grad()
        wrapped.disable_hooks()
        (factors * losses).sum().backward()

    return step


def opake(model: nn.Module, batch: Batch, micro_batch: int | None) -> Step:
    """As its documentation says: patched for vmap, then ``clipped_grad`` of a function of
    parameters and one example.
    """
    from opake.dpsgd.clipping import clipped_grad
    from opake.patches import apply_model_patches

    model.train()
    if "x" not in batch:
        apply_model_patches(model)
    names = list(batch)
    parameters = {name: p.detach() for name, p in trainable(model).items()}

    def loss(values: dict[str, Tensor], *example: Tensor) -> Tensor:
        alone = {name: x.unsqueeze(0) for name, x in zip(names, example)}

        def called(*positional: Tensor, **named: Tensor) -> Any:
            return torch.func.functional_call(model, values, positional, named)

        return per_example_loss(called, alone)[0]  # type: ignore[arg-type]

    function, state = clipped_grad(
        loss,
        clipping_norm=1.0,
        batch_argnums=tuple(range(1, len(names) + 1)),
        microbatch_size=micro_batch,
    )
    return lambda: function(parameters, *batch.values(), state=state)


def small_part(batch: Batch) -> int:
    """A micro-batch that a peer's user might set when the whole batch does not fit."""
    return 8 if len(batch["y"]) > 8 else 1


METHODS: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "non-private": non_private,
    "quietgrad": quietgrad_exact,
    "quietgrad-hutch": quietgrad_hutch,
    "opacus-hooks": opacus_hooks,
    "opacus-ghost": lambda model, batch: opacus_two_passes(model, batch, ghost=True),
    "opacus-fast-gradient": lambda model, batch: opacus_two_passes(model, batch, ghost=False),
    "opake": lambda model, batch: opake(model, batch, None),
    "opake-micro-batch": lambda model, batch: opake(model, batch, small_part(batch)),
}


def worker(regime: str, method: str) -> None:
    """The other side of ``Worker``."""
    limit_memory(REGIMES[regime].limit_gib)
    answer_steps(lambda: METHODS[method](*build(regime)))


def worker_of(regime: str, method: str) -> Worker:
    return Worker(regime, method, Path(__file__))


def measure_time(
    regime: str,
    methods: list[str],
    repeats: int,
    start: Callable[[str, str], Worker] = worker_of,
) -> dict[str, Any]:
    workers: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    warm: dict[str, float] = {}
    seconds: dict[str, dict[int, float]] = {}
    processor: dict[str, dict[int, float]] = {}
    try:
        for method in methods:
            one = start(regime, method)
            first = one.step()
            second = None if first is None else one.step()  # the first may compile, trace and check
            if second is None:
                failed[method] = one.error
                one.end()
                continue
            workers[method], warm[method] = one, second
            seconds[method], processor[method] = {}, {}
        for round_ in range(repeats):
            for method in list(workers):
                if round_ >= ROUNDS_OF_SLOW and warm[method] > SLOW * warm["non-private"]:
                    continue
                taken = workers[method].step()
                if taken is None:
                    failed[method] = workers.pop(method).error
                    del seconds[method]
                else:
                    seconds[method][round_] = taken
                    processor[method][round_] = workers[method].answer["processor_seconds"]
    finally:
        for one in workers.values():
            one.end()
    base = seconds["non-private"]
    report: dict[str, Any] = {
        "failed": failed,
        "seconds_non_private": statistics.median(base.values()),
        "processor_seconds_non_private": statistics.median(processor["non-private"].values()),
        "methods": {},
    }
    for method, values in seconds.items():
        ratios = [taken / base[round_] for round_, taken in values.items()]
        report["methods"][method] = {
            "time_ratio": {
                "median": statistics.median(ratios),
                "min": min(ratios),
                "max": max(ratios),
            },
            "processor_time_ratio": statistics.median(
                taken / processor["non-private"][round_]
                for round_, taken in processor[method].items()
            ),
            "seconds": statistics.median(values.values()),
            "rounds": len(ratios),
        }
    return report


def added_memory_mib(regime: str, method: str) -> float | None:
    command = [sys.executable, __file__, "--memory-of", regime, method]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None


def memory_child(regime: str, method: str) -> None:
    """Prints by how much two steps raise the resident memory over what model and data occupy (the
    peak is reset first).
    """
    limit_memory(REGIMES[regime].limit_gib)
    print(added_mib(METHODS[method](*build(regime))))


def measure(
    regime: str, methods: list[str], repeats: int, environment: dict[str, Any]
) -> dict[str, Any]:
    spec = REGIMES[regime]
    model, _ = build(regime)
    entry: dict[str, Any] = {
        "batch": spec.batch,
        "length": spec.length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in trainable(model).values()),
        "memory_limit_gib": spec.limit_gib,
        "repeats": repeats,
        "started": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "load_at_start": round(os.getloadavg()[0], 2),
        "environment": environment,
    }
    del model
    entry |= measure_time(regime, methods, repeats)
    for method, row in entry["methods"].items():
        row["added_memory_mib"] = added_memory_mib(regime, method)
    base = entry["methods"]["non-private"]["added_memory_mib"] or float("nan")
    for row in entry["methods"].values():
        if row["added_memory_mib"] is not None:
            row["memory_ratio"] = row["added_memory_mib"] / base
    return entry


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs of one regime at different hours as one: medians over runs, ranges over all rounds; what
    failed in one of them has failed.
    """
    last = runs[-1]
    whole = {**last, "started": [run["started"] for run in runs], "runs": runs, "methods": {}}
    whole["failed"] = {name: why for run in runs for name, why in run["failed"].items()}
    for key in ("seconds_non_private", "processor_seconds_non_private"):
        whole[key] = statistics.median(run[key] for run in runs)
    for method in last["methods"]:
        rows = [run["methods"][method] for run in runs if method in run["methods"]]
        if len(rows) < len(runs):
            continue
        ratios = [row["time_ratio"] for row in rows]
        found: dict[str, Any] = {
            "time_ratio": {
                "median": statistics.median(ratio["median"] for ratio in ratios),
                "min": min(ratio["min"] for ratio in ratios),
                "max": max(ratio["max"] for ratio in ratios),
            },
            "rounds": sum(row["rounds"] for row in rows),
        }
        for key in ("processor_time_ratio", "seconds", "added_memory_mib", "memory_ratio"):
            known = [row[key] for row in rows if row.get(key) is not None]
            if known:
                found[key] = statistics.median(known)
        whole["methods"][method] = found
    return whole


def has(
    report: dict[str, Any],
    regime: str,
    methods: list[str],
    repeats: int,
    environment: dict[str, Any],
) -> bool:
    """Whether the report holds this regime, measured alike."""
    entry = report["regimes"].get(regime, {})
    known = {*entry.get("methods", {}), *entry.get("failed", {})}
    return (
        entry.get("environment") == environment
        and entry["repeats"] >= repeats
        and known >= set(methods)
    )


def show(regime: str, entry: dict[str, Any]) -> None:
    for method, row in entry["methods"].items():
        r = row["time_ratio"]
        print(
            f"{regime:12s} {method:20s} time {r['median']:6.2f} [{r['min']:.2f}-{r['max']:.2f}]  "
            f"memory {row.get('memory_ratio', float('nan')):6.2f}"
        )
    for method, why in entry["failed"].items():
        print(f"{regime:12s} {method:20s} {why}")
    sys.stdout.flush()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        choices=list(METHODS),
        help="beside non-private",
    )
    parser.add_argument(
        "--again", action="store_true", help="measure what the output file holds already, too"
    )
    parser.add_argument(
        "--another", action="store_true", help="add a run of now to those that the file holds"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/clipping_peers.json")
    )
    parser.add_argument("--worker", nargs=2, metavar=("REGIME", "METHOD"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--memory-of", nargs=2, metavar=("REGIME", "METHOD"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.worker:
        worker(*arguments.worker)
        return
    if arguments.memory_of:
        memory_child(*arguments.memory_of)
        return
    methods = ["non-private", *(m for m in arguments.methods if m != "non-private")]
    environment = {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **{name: installed(name) for name in PACKAGES},
    }
    report: dict[str, Any] = {"not_measured": NOT_MEASURED, "regimes": {}}
    with contextlib.suppress(FileNotFoundError):
        report["regimes"] = json.loads(arguments.output.read_text(encoding="utf-8"))["regimes"]
    for regime in arguments.regimes:
        known = has(report, regime, methods, arguments.repeats, environment)
        if arguments.again or arguments.another or not known:
            found = measure(regime, methods, arguments.repeats, environment)
            before = report["regimes"][regime].get("runs", []) if known else []
            if arguments.another:
                found = together([*before, found])
            report["regimes"][regime] = found
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        show(regime, report["regimes"][regime])


if __name__ == "__main__":
    main()
