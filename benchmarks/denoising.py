"""What spectral denoising costs beside the step that it follows, and how often it takes noise for
signal.

    python benchmarks/denoising.py [--regimes minilm-full minilm-lora llama ...] [--parts overhead
    noise] [--output benchmarks/results/denoising.json]

Overhead: the denoiser's time over that of the step's gradient work (clipping of the whole batch,
noise, mean; no optimiser), taken in turn, medians and ranges over rounds. Twice: on releases in
which nothing stands out (the certified test alone), and with three spikes of 1.5, 2 and 4 detection
thresholds in every matrix (test, search and update everywhere, a dear case); each for
``SpikesWithBulk`` on the gradient and ``PersistentAmplification`` on the momentum. "naive" is a
full singular value decomposition of every matrix, as a first implementation would have it. Random
weights and token ids: times do not depend on their values.

Where a step takes a minute or more here (RoBERTa at batch 1024, the Llama at 128), a micro-batch is
timed and multiplied; the others run whole.

Noise: pure noise through the published rule at kappa = 1.02, how many of a thousand draws are
changed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.denoising import (
    MomentNoise,
    PersistentAmplification,
    SpikesWithBulk,
    denoise_matrix,
    detection_threshold,
    shrink,
)
from quietgrad.denoising.matrices import matrix_shapes
from quietgrad.noise import GaussianNoise, NoisySum
from quietgrad.randomness import RandomKey

KEY = RandomKey.from_seed(0)


@dataclass(frozen=True)
class Regime:
    """A model's shape and a batch; ``measured`` examples are timed and the time is multiplied up to
    ``batch``.
    """

    hidden: int
    layers: int
    intermediate: int
    batch: int
    length: int
    measured: int
    micro_batch: int
    lora: int = 0
    causal: bool = False


REGIMES = {
    "minilm-full": Regime(384, 6, 1536, 1024, 32, 1024, 128),
    "minilm-lora": Regime(384, 6, 1536, 1024, 32, 1024, 128, lora=16),
    "llama": Regime(512, 4, 1536, 2, 512, 2, 2, causal=True),
    "llama-128": Regime(512, 4, 1536, 128, 512, 2, 2, causal=True),
    "roberta-base": Regime(768, 12, 3072, 1024, 32, 32, 32),
    "roberta-base-lora": Regime(768, 12, 3072, 1024, 32, 32, 32, lora=16),
    "roberta-large": Regime(1024, 24, 4096, 1024, 32, 16, 16),
}


def build(spec: Regime) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    common = {
        "hidden_size": spec.hidden, "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.hidden // 64,
        "intermediate_size": spec.intermediate, "vocab_size": 8000,
        "max_position_embeddings": max(512, spec.length),
    }  # fmt: skip
    model: Any
    if spec.causal:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**common, num_key_value_heads=spec.hidden // 64)
        )
    else:
        config = transformers.BertConfig(
            **common,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
        model = transformers.BertForSequenceClassification(config)
        # Embeddings are frozen: denoisers leave them alone, and their noise would only lengthen the
        # step.
        model.bert.embeddings.requires_grad_(False)
    if spec.lora:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=spec.lora, lora_dropout=0.0, target_modules="all-linear")
        )
    return model


def step_of(
    model: nn.Module, spec: Regime
) -> tuple[Callable[[], ClippedSum], Callable[[ClippedSum], NoisySum]]:
    """One step's gradient work: clipped sum of the measured examples, and noise, which is drawn
    once a step whatever the batch.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 8000, (spec.measured, spec.length), generator=generator)
    labels = torch.randint(0, 3, (spec.measured,), generator=generator)
    noise = GaussianNoise(1.0)

    def loss(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=_has_bfloat16()):
            logits = network(input_ids=batch["ids"]).logits
        if spec.causal:
            return F.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), batch["ids"][:, 1:], reduction="none"
            ).mean(1)
        return F.cross_entropy(logits.float(), batch["y"], reduction="none")

    bound = Clipper(1.0, physical_batch_size=spec.micro_batch).bind(model, loss)
    return lambda: bound.clip({"ids": ids, "y": labels}), lambda clipped: noise.update(
        clipped, lambda _: KEY, noise.init()
    )[0]


def _has_bfloat16() -> bool:
    """Elsewhere it is emulated, and slower than float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pure_noise(model: nn.Module) -> NoisySum:
    generator = torch.Generator().manual_seed(1)
    return NoisySum(
        {
            n: torch.randn(p.shape, generator=generator)
            for n, p in model.named_parameters()
            if p.requires_grad
        },
        1.0,
    )


def with_spikes(noisy: NoisySum, model: nn.Module) -> NoisySum:
    generator = torch.Generator().manual_seed(2)
    gradients = dict(noisy.gradients)
    for name, shape in matrix_shapes(gradients, model, False).items():
        m, n = shape.rows, shape.columns
        rank = min(3, m, n)
        u = torch.linalg.qr(torch.randn(m, rank, generator=generator)).Q
        v = torch.linalg.qr(torch.randn(n, rank, generator=generator)).Q
        strengths = torch.tensor([4.0, 2.0, 1.5])[:rank] * detection_threshold((m, n), 1.0)
        gradients[name] = gradients[name] + ((u * strengths) @ v.T).reshape(gradients[name].shape)
    return NoisySum(gradients, 1.0)


def on_the_momentum(noisy: NoisySum, model: nn.Module) -> dict[str, Tensor]:
    """What persists in the momentum, for a release that shows all of what stands out again: the
    dearest case.
    """
    rule, level = PersistentAmplification(), MomentNoise(variance=1.0, releases=1, mass=1.0)
    added, _ = rule.added(noisy.gradients, level, noisy, 1.0, {}, model)
    return {name: part.add_(noisy.gradients[name]) for name, part in added.items()}


def naive(noisy: NoisySum, model: nn.Module) -> dict[str, Tensor]:
    """Eq. 9 by a full decomposition of every matrix."""
    result = dict(noisy.gradients)
    for name in matrix_shapes(result, model, False):
        u, y, vh = torch.linalg.svd(result[name].flatten(1), full_matrices=False)
        kept = (u * shrink(y, (u.shape[0], vh.shape[1]), 1.0)) @ vh
        if kept.norm() > 0:
            result[name] = (kept * (result[name].norm() / kept.norm())).reshape(result[name].shape)
    return result


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def overhead(name: str, rounds: int) -> dict[str, Any]:
    spec = REGIMES[name]
    model = build(spec)
    clip, release = step_of(model, spec)
    clipped = clip()
    quiet = pure_noise(model)
    loud = with_spikes(quiet, model)
    rule = SpikesWithBulk()
    methods: dict[str, Callable[[], object]] = {
        "nothing_stands_out": lambda: rule.denoise(quiet, model),
        "three_spikes_everywhere": lambda: rule.denoise(loud, model),
        "momentum_nothing_stands_out": lambda: on_the_momentum(quiet, model),
        "momentum_three_spikes_everywhere": lambda: on_the_momentum(loud, model),
    }
    for method in methods.values():
        method()
    steps, times = [], {method: [] for method in methods}
    for _ in range(rounds):
        steps.append(seconds(clip) * spec.batch / spec.measured + seconds(lambda: release(clipped)))
        for method, function in methods.items():
            times[method].append(seconds(function))
    naive_seconds = seconds(lambda: naive(loud, model))
    entry: dict[str, Any] = {
        "batch": spec.batch,
        "length": spec.length,
        "step_timed_on_examples": spec.measured,
        "step_seconds": statistics.median(steps),
        "matrices": len(matrix_shapes(quiet.gradients, model, False)),
        "entries": sum(g.numel() for g in quiet.gradients.values()),
        "rounds": rounds,
        "naive_percent": 100 * naive_seconds / statistics.median(steps),
    }
    for method, values in times.items():
        percents = [100 * v / s for v, s in zip(values, steps, strict=True)]
        entry[method] = {
            "milliseconds": 1e3 * statistics.median(values),
            "percent": {
                "median": statistics.median(percents),
                "min": min(percents),
                "max": max(percents),
            },
        }
        p = entry[method]["percent"]
        print(
            f"{name:18} {method:24} {entry[method]['milliseconds']:8.1f} ms = {p['median']:.3f} % "
            f"[{p['min']:.3f}-{p['max']:.3f}] of a step of "
            f"{entry['step_seconds']:.2f} s; naive {entry['naive_percent']:.2f} %",
            flush=True,
        )
    return entry


def false_alarms(shape: tuple[int, int], draws: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    noises = (torch.randn(shape, generator=generator) for _ in range(draws))
    changed = sum(denoise_matrix(noise, 1.0) is not noise for noise in noises)
    print(f"pure noise {shape}: {changed} of {draws} draws changed", flush=True)
    return {"draws": draws, "changed": changed}


def environment() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--regimes", nargs="*", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument(
        "--parts", nargs="*", default=["overhead", "noise"], choices=["overhead", "noise"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/denoising.json"))
    arguments = parser.parse_args()
    report: dict[str, Any] = (
        json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    )
    if "overhead" in arguments.parts:
        for name in arguments.regimes:
            here = environment()
            report.setdefault("overhead", {})[name] = overhead(name, arguments.rounds) | {
                "environment": here
            }
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    if "noise" in arguments.parts:
        report["pure_noise_at_kappa_1.02"] = {
            f"{m}x{n}": false_alarms((m, n), 1000)
            for m, n in ((300, 200), (384, 384), (768, 3072), (16, 384))
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
