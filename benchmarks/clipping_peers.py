"""Time and memory of clipping against the non-private step and against Opacus, interleaved in one run.

    python benchmarks/clipping_peers.py [--repeats 7] [--regimes bert-32 llama-512 ...] [--output benchmarks/results/clipping_peers.json]

Every method runs forward and backward of the same model on the same batch and ends with a gradient (non-private) or a clipped sum. Ratios are to the
non-private step of the same round; median and range over rounds. Memory is the peak resident memory that a fresh process adds over model and data
(Linux). Needs the dev extra.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REGIMES: dict[str, dict[str, Any]] = {
    "bert-32": {"model": "bert", "batch": 64, "length": 32},
    "bert-128": {"model": "bert", "batch": 16, "length": 128},
    "llama-512": {"model": "llama", "batch": 2, "length": 512},
    "llama-1024": {"model": "llama", "batch": 2, "length": 1024},
}
METHODS = ["non-private", "quietgrad", "quietgrad-hutch", "opacus-hooks", "opacus-ghost"]


def build(regime: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    spec = REGIMES[regime]
    torch.manual_seed(0)
    b, t = spec["batch"], spec["length"]
    ids = torch.randint(5, 4000, (b, t))
    if spec["model"] == "bert":
        config = hf.BertConfig(
            vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
        )  # fmt: skip
        model = hf.BertForSequenceClassification(config)
        # Opacus cannot broadcast BERT's default position ids, so they are given to all.
        positions = torch.arange(t).expand(b, t).contiguous()
        return model, {
            "input_ids": ids,
            "position_ids": positions,
            "token_type_ids": torch.zeros_like(ids),
            "y": torch.randint(0, 3, (b,)),
        }
    config = hf.LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=1408,
        max_position_embeddings=4096,
    )
    return hf.LlamaForCausalLM(config), {"input_ids": ids, "y": ids}


def per_example_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k != "y"}
    logits = model(**inputs).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, batch["y"], reduction="none")
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["y"][:, 1:], reduction="none").mean(1)


def step_of(method: str, model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Any]:
    """A function that does one step's gradient work by one method."""
    if method == "non-private":

        def plain() -> None:
            model.zero_grad()
            per_example_loss(model, batch).mean().backward()

        return plain
    if method.startswith("quietgrad"):
        from quietgrad.clipping import Clipper

        clipper = Clipper(1.0, "hutch" if method.endswith("hutch") else "auto")
        return lambda: clipper.clip(model, per_example_loss, batch)
    if method == "opacus-hooks":
        from opacus import GradSampleModule

        wrapped = GradSampleModule(model, strict=False)

        def hooks() -> None:
            wrapped.zero_grad()
            per_example_loss(wrapped, batch).mean().backward()
            norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()], 1).norm(dim=1)
            factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
            for p in model.parameters():
                p.grad = torch.einsum("b,b...->...", factors, p.grad_sample)
                p.grad_sample = None

        return hooks
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    ghost = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True, strict=False)

    def two_passes() -> None:
        ghost.zero_grad()
        ghost.enable_hooks()
        losses = per_example_loss(ghost, batch)
        losses.mean().backward(retain_graph=True)
        factors = ghost.get_clipping_coef().detach()
        ghost.zero_grad()
        ghost.disable_hooks()
        (factors * losses).sum().backward()

    return two_passes


def measure_time(regime: str, repeats: int) -> dict[str, Any]:
    steps: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    for method in METHODS:
        model, batch = build(regime)  # a model each: Opacus leaves its hooks on it
        step = step_of(method, model, batch)
        try:
            step()
            steps[method] = step
        except Exception as error:
            failed[method] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    seconds: dict[str, list[float]] = {m: [] for m in steps}
    for _ in range(repeats):
        for method, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[method].append(time.perf_counter() - started)
    base = seconds["non-private"]
    report: dict[str, Any] = {"failed": failed, "seconds_non_private": statistics.median(base)}
    for method, values in seconds.items():
        ratios = [v / b for v, b in zip(values, base, strict=True)]
        report[method] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return report


def added_memory_mib(regime: str, method: str) -> float:
    command = [sys.executable, __file__, "--memory-of", regime, method]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else float("nan")


def memory_child(regime: str, method: str) -> None:
    """Prints by how much one step raises the resident memory over what model and data occupy (Linux: the peak is reset first)."""
    model, batch = build(regime)
    step = step_of(method, model, batch)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    step()
    step()
    print(max(_status("VmHWM") - before, 0.0))


def _status(key: str) -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) / 1024 for line in file if line.startswith(key))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/clipping_peers.json"))
    parser.add_argument("--memory-of", nargs=2, metavar=("REGIME", "METHOD"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.memory_of:
        memory_child(*arguments.memory_of)
        return
    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            **{name: version(name) for name in ("torch", "opacus", "transformers")},
        },
        "regimes": {},
    }
    for regime in arguments.regimes:
        entry = measure_time(regime, arguments.repeats)
        memory = {m: added_memory_mib(regime, m) for m in METHODS if m not in entry["failed"]}
        entry["added_memory_mib"] = memory
        report["regimes"][regime] = entry
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for method in METHODS:
            if method in entry:
                r = entry[method]
                print(
                    f"{regime:12s} {method:16s} time {r['median']:6.2f} [{r['min']:.2f}-{r['max']:.2f}]  "
                    f"memory {memory[method] / max(memory['non-private'], 1.0):6.2f}"
                )
            else:
                print(f"{regime:12s} {method:16s} {entry['failed'][method]}")


if __name__ == "__main__":
    main()
