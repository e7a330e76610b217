"""Time and memory of clipping a Llama of 1.2 billion parameters at 4096 tokens on one GPU,
unattended, in under nine minutes.

    python benchmarks/gpu_llama.py [--minutes 8.5] [--tunings full lora] [--methods quietgrad ...]
    [--output benchmarks/results/gpu_llama.json]
    python benchmarks/gpu_llama.py --device cpu --tiny --output FILE          (the same code on a
    tiny model)

The shape of Llama 3.2 1B (16 layers, hidden 2048, 32 heads of 64, 8 for keys and values,
intermediate 8192, 128256 tokens, tied embeddings), random weights in bfloat16, batch 2, no gradient
checkpointing; tuned in full, and by LoRA of rank 16 on all linear layers of the blocks. Every
method ends with a gradient (non-private) or a clipped sum, and computes the same loss with the same
code: a softmax over the vocabulary for a few hundred positions at a time, so that the logits exist
in bfloat16 only.

Each method has a process of its own with a time limit; running out of memory is caught and
reported. Warm-up steps come first, then one step whose memory is measured, then rounds of one
non-private step and one of the method on the same model (Opacus' hooks are switched off for the
former). Times are from CUDA events; ratios are taken within a round, median and range over rounds.
The guard looks in the first warm-up step alone. Memory is the largest that torch had allocated
during the step: in total, and over model and data. Ratios of memory are to the non-private method's
process. Results are written after every method; what time did not suffice for is named.

Targets for the planner's choice ("quietgrad"): at most 1.15 times the time of the non-private step,
at most 1.10 times its peak memory.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Lets a process ask for GPUs without initialising them, which would spoil its children.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Step = Callable[[], Any]

TARGETS = {"time_ratio": 1.15, "peak_memory_ratio": 1.10}
BATCH, LENGTH = 2, 4096
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "use_cache": False,
}
TINY_LENGTH = 64
TINY = LLAMA_1B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "head_dim": 16,
}
TUNINGS = ("full", "lora")
POSITIONS_AT_ONCE = 256  # in the loss: 125 MiB of logits in float32
WARM_UP_STEPS, ROUNDS = 2, 9
UNLOOKED = 2  # the third release, as all but the 1st, 2nd, 4th, 8th, ...: no guard looks there
SLOW_SECONDS, ROUNDS_OF_SLOW = 4.0, 2
METHOD_LIMIT_SECONDS = 80.0
LEAST_SECONDS = 15.0  # a method is not started with less left
PRELOADED = ("transformers", "peft", "opacus", "opacus.grad_sample", "quietgrad.clipping")
PACKAGES = ("torch", "opacus", "transformers", "peft")


class CrossEntropyByBlocks(torch.autograd.Function):
    """Cross-entropy of every position in float32, from logits that stay in their own precision."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, targets_n: Tensor) -> Tensor:
        log_sums = torch.empty(len(logits_nv), dtype=torch.float32, device=logits_nv.device)
        picked = torch.empty_like(log_sums)
        for start in range(0, len(logits_nv), POSITIONS_AT_ONCE):
            span = slice(start, start + POSITIONS_AT_ONCE)
            wide = logits_nv[span].float()
            log_sums[span] = wide.logsumexp(dim=1)
            picked[span] = wide.gather(1, targets_n[span].unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(logits_nv, targets_n, log_sums)
        return log_sums - picked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits_nv, targets_n, log_sums = ctx.saved_tensors
        (gradient_n,) = gradients
        result = torch.empty_like(logits_nv)
        for start in range(0, len(logits_nv), POSITIONS_AT_ONCE):
            span = slice(start, start + POSITIONS_AT_ONCE)
            wide = logits_nv[span].float().sub_(log_sums[span].unsqueeze(1)).exp_()
            targets = targets_n[span].unsqueeze(1)
            wide.scatter_add_(1, targets, torch.full_like(targets, -1.0, dtype=wide.dtype))
            result[span] = wide.mul_(gradient_n[span].unsqueeze(1))
        return result, None


def per_example_loss(model: nn.Module, batch: Batch) -> Tensor:
    """[b] mean cross-entropy of the next token. The last position has none and counts zero: cutting
    it off would copy the logits.
    """
    ids = batch["input_ids"]
    logits = model(input_ids=ids).logits
    losses = CrossEntropyByBlocks.apply(logits.flatten(0, 1), ids.roll(-1, dims=1).flatten()).view(
        ids.shape
    )
    return losses[:, :-1].mean(dim=1)


def build(tuning: str, device: str, tiny: bool) -> tuple[nn.Module, Batch]:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(**(TINY if tiny else LLAMA_1B), dtype=torch.bfloat16)
    with torch.device(device):
        model: nn.Module = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if tuning == "lora":
        import peft

        # Both factors random, so that no gradient is zero; in the model's own precision.
        lora = peft.LoraConfig(
            r=16,
            lora_alpha=32,
            lora_dropout=0.0,
            target_modules="all-linear",
            init_lora_weights=False,
        )
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False).to(device)
    t = TINY_LENGTH if tiny else LENGTH
    ids = torch.randint(0, config.vocab_size, (BATCH, t), device=device)
    return model.train(), {"input_ids": ids}


def plain_step(model: nn.Module, batch: Batch) -> Step:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        per_example_loss(model, batch).mean().backward()

    return step


def non_private(model: nn.Module, batch: Batch) -> tuple[Step, Step]:
    step = plain_step(model, batch)
    return step, step


def planners_choice() -> Any:
    """What a user gets who asks for exact clipping and nothing else."""
    from quietgrad.clipping import Clipper

    return Clipper(1.0, "auto")


def quietgrad(estimator: str | None) -> Callable[[nn.Module, Batch], tuple[Step, Step]]:
    def prepare(model: nn.Module, batch: Batch) -> tuple[Step, Step]:
        from quietgrad.clipping import Clipper

        clipper = planners_choice() if estimator is None else Clipper(1.0, estimator)  # type: ignore[arg-type]
        bound = clipper.bind(model, per_example_loss)
        numbers = itertools.chain([0], itertools.repeat(UNLOOKED))

        def step() -> None:
            model.zero_grad(set_to_none=True)
            bound.clip(batch, step=next(numbers))

        return step, plain_step(model, batch)

    return prepare


def opacus_hooks(model: nn.Module, batch: Batch) -> tuple[Step, Step]:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, strict=False)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        wrapped.enable_hooks()
        wrapped.zero_grad(set_to_none=True)
        per_example_loss(wrapped, batch).mean().backward()
        norms = torch.stack(
            [torch.linalg.vector_norm(p.grad_sample.flatten(1), dim=1) for p in parameters], 1
        )
        factors = (1.0 / (norms.norm(dim=1) + 1e-6)).clamp(max=1.0)
        for p in parameters:
            p.grad = torch.einsum("b,b...->...", factors.to(p.dtype), p.grad_sample)
            p.grad_sample = None

    return step, without_hooks(wrapped, model, batch)


def opacus_two_passes(ghost: bool) -> Callable[[nn.Module, Batch], tuple[Step, Step]]:
    def prepare(model: nn.Module, batch: Batch) -> tuple[Step, Step]:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=1.0, use_ghost_clipping=ghost, strict=False
        )

        def step() -> None:
            wrapped.zero_grad(set_to_none=True)
            wrapped.enable_hooks()
            losses = per_example_loss(wrapped, batch)
            losses.mean().backward(retain_graph=True)
            factors = wrapped.get_clipping_coef().detach()
            wrapped.zero_grad(set_to_none=True)
            wrapped.disable_hooks()
            (factors * losses).sum().backward()

        return step, without_hooks(wrapped, model, batch)

    return prepare


def without_hooks(wrapped: Any, model: nn.Module, batch: Batch) -> Step:
    plain = plain_step(model, batch)

    def step() -> None:
        wrapped.disable_hooks()
        plain()

    return step


# In order of importance, should time run out.
METHODS: dict[str, Callable[[nn.Module, Batch], tuple[Step, Step]]] = {
    "non-private": non_private,
    "quietgrad": quietgrad(None),
    "quietgrad-hutch": quietgrad("hutch"),
    "quietgrad-ghost": quietgrad("ghost"),
    "quietgrad-materialized": quietgrad("materialized"),
    "quietgrad-hutch++": quietgrad("hutch++"),
    "opacus-fast-gradient": opacus_two_passes(ghost=False),
    "opacus-ghost": opacus_two_passes(ghost=True),
    "opacus-hooks": opacus_hooks,
}


class Meter:
    """Seconds and bytes of a step, on a GPU or (resident memory, Linux) on the processor."""

    def __init__(self, device: str) -> None:
        self.cuda = device != "cpu"

    def seconds(self, step: Step) -> float:
        if not self.cuda:
            started = time.perf_counter()
            step()
            return time.perf_counter() - started
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        step()
        after.record()
        torch.cuda.synchronize()
        return float(before.elapsed_time(after)) / 1000

    def held(self) -> int:
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        return _status("VmRSS")

    def peak(self, step: Step) -> int:
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        step()
        return _status("VmHWM")


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def measure(
    tuning: str, method: str, device: str, tiny: bool, seconds_left: float, answers: Connection
) -> None:
    """In a child process: sends what is known so far, again and again, so that a time limit loses
    nothing.
    """
    warnings.simplefilter("ignore")
    deadline = time.monotonic() + seconds_left
    found: dict[str, Any] = {}
    try:
        meter = Meter(device)
        model, batch = build(tuning, device, tiny)
        found["device"] = description(device)
        found["parameters"] = sum(p.numel() for p in model.parameters())
        found["trainable_parameters"] = sum(
            p.numel() for p in model.parameters() if p.requires_grad
        )
        held = meter.held()
        step, plain = METHODS[method](model, batch)
        warm = [meter.seconds(step) for _ in range(WARM_UP_STEPS)]
        model.zero_grad(set_to_none=True)
        peak = meter.peak(step)
        found |= {
            "held_mib": held / 2**20,
            "peak_mib": peak / 2**20,
            "added_mib": (peak - held) / 2**20,
        }
        answers.send(found)
        meter.seconds(plain)
        rounds = ROUNDS_OF_SLOW if warm[-1] > SLOW_SECONDS else ROUNDS
        base: list[float] = []
        own: list[float] = []
        for _ in range(rounds):
            base.append(meter.seconds(plain))
            own.append(meter.seconds(step))
            found |= {
                "rounds": len(own),
                "seconds": spread(own),
                "seconds_non_private": spread(base),
                "time_ratio": spread([x / y for x, y in zip(own, base)]),
            }
            answers.send(found)
            if time.monotonic() + 1.5 * (base[-1] + own[-1]) > deadline:
                break
    except torch.OutOfMemoryError as error:
        found["error"] = "out of memory: " + " ".join(str(error).split())[:160]
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found["error"] = f"{type(error).__name__}: {lines[0][:200]}"
    answers.send(found | {"complete": True})


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def description(device: str) -> str:
    return torch.cuda.get_device_name() if device != "cpu" else "processor"


def in_child(start: str, limit: float, *arguments: Any) -> dict[str, Any]:
    """Runs ``measure`` in a process of its own and takes what it sent within the limit."""
    context: Any = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(*arguments, limit - 5.0, sender))
    process.start()
    sender.close()
    found: dict[str, Any] = {}
    deadline = time.monotonic() + limit
    try:
        while not found.get("complete") and receiver.poll(max(0.0, deadline - time.monotonic())):
            found = receiver.recv()
    except EOFError:
        process.join()
        found["error"] = f"the process ended with status {process.exitcode}"
    if not found.pop("complete", False) and "error" not in found:
        found["error"] = f"not done within {limit:.0f} s"
        process.kill()
    process.join()
    return found


def driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, check=True)
            .stdout.strip()
            .splitlines()[0]
        )
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def compare(entry: dict[str, Any]) -> None:
    """Adds the ratios of memory and, for the planner's choice, the verdicts."""
    base = entry.get("non-private", {})
    for row in entry.values():
        if "peak_mib" in row and "peak_mib" in base:
            row["peak_memory_ratio"] = row["peak_mib"] / base["peak_mib"]
            row["added_memory_ratio"] = row["added_mib"] / max(base["added_mib"], 1.0)
    row = entry.get("quietgrad", {})
    if "time_ratio" in row and "peak_memory_ratio" in row:
        reached = {
            "time_ratio": row["time_ratio"]["median"],
            "peak_memory_ratio": row["peak_memory_ratio"],
        }
        row["targets"] = {
            name: "pass" if reached[name] <= limit else "miss" for name, limit in TARGETS.items()
        }


def show(tuning: str, method: str, row: dict[str, Any]) -> None:
    words = f"{tuning:5s} {method:24s}"
    if "time_ratio" in row:
        r = row["time_ratio"]
        words += (
            f" {row['seconds']['median']:8.4f} s  time {r['median']:6.3f} "
            f"[{r['min']:.3f}-{r['max']:.3f}]"
        )
    if "peak_mib" in row:
        words += (
            f"  peak {row['peak_mib']:9.1f} MiB, {row.get('peak_memory_ratio', float('nan')):6.3f}"
        )
        words += f"  added {row.get('added_memory_ratio', float('nan')):6.3f}"
    sys.stdout.write(f"{words}  {row.get('targets', '')} {row.get('error', '')}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--tiny", action="store_true", help="a model of 0.1 million parameters, 64 tokens"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.5,
        help="for everything; methods that do not fit are skipped",
    )
    parser.add_argument("--tunings", nargs="+", default=list(TUNINGS), choices=TUNINGS)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        choices=list(METHODS),
        help="beside non-private",
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu_llama.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    deadline = time.monotonic() + 60 * arguments.minutes
    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            **{name: installed(name) for name in PACKAGES},
            "cuda": torch.version.cuda,
            "driver": driver() if arguments.device == "cuda" else None,
        },
        "setting": {
            "batch": BATCH,
            "length": TINY_LENGTH if arguments.tiny else LENGTH,
            "model": TINY if arguments.tiny else LLAMA_1B,
        },
        "targets": TARGETS,
        "tunings": {tuning: {} for tuning in arguments.tunings},
    }
    start = "fork"  # children then share the imports, which take longer than most methods
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            sys.stdout.write(f"without {name}: {error}\n")
    methods = [
        "non-private",
        *(m for m in METHODS if m in arguments.methods and m != "non-private"),
    ]
    for method in methods:
        for tuning in arguments.tunings:
            entry = report["tunings"][tuning]
            task = (tuning, method, arguments.device, arguments.tiny)
            left = deadline - time.monotonic()
            if left < LEAST_SECONDS:
                entry[method] = {"error": "skipped: no time left"}
                show(tuning, method, entry[method])
                continue
            row = in_child(start, min(METHOD_LIMIT_SECONDS, left), *task)
            if "forked subprocess" in row.get(
                "error", ""
            ):  # something imported has touched the GPU
                start = "spawn"
                left = deadline - time.monotonic()
                row = in_child(start, min(METHOD_LIMIT_SECONDS, max(left, LEAST_SECONDS)), *task)
            entry[method] = row
            compare(entry)
            show(tuning, method, row)
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
