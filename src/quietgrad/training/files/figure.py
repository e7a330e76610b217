"""The run's figure: validation score and privacy spent, against steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.events import ADD_REMOVE, per_unit
from quietgrad.training.tasks.metrics import BY_KEY, MEAN_AUC


def score_figure(
    metrics: list[dict[str, Any]], result: dict[str, Any], reference: float | None, path: Path
) -> None:
    """Draws and saves the figure.

    Args:
        metrics: records of evaluations on the validation part.
        result: the run's result record.
        reference: accuracy of the same training without privacy, if it was measured.
        path: PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    steps = [m["step"] for m in metrics]
    metric = BY_KEY[result.get("metric", "accuracy")]
    scores = [m[f"validation_{metric.key}"] for m in metrics]
    axis.plot(steps, scores, "o-", color="#1f5fa8", label=f"validation {metric.name}")
    key = f"averaged_validation_{metric.key}"
    averaged = [(m["step"], m[key]) for m in metrics if key in m]
    if averaged:
        of = f"validation {metric.name}, averaged weights"
        axis.plot(*zip(*averaged, strict=True), "s--", color="#6fa8dc", markersize=4, label=of)
    final = result["metrics"].get(metric.key)
    if final is not None:
        axis.plot(
            [result["steps"]],
            [final],
            "D",
            color="#0b2e59",
            markersize=8,
            label=f"test {metric.name}, {final:.3f}",
        )
    if reference is not None:
        axis.axhline(
            reference,
            color="#3a7d44",
            linestyle="--",
            linewidth=1,
            label=f"without privacy, {reference:.3f}",
        )
    guess = 0.5 if metric is MEAN_AUC else result.get("majority_accuracy")
    words = "guessing" if metric is MEAN_AUC else "majority class"
    if guess is not None:
        axis.axhline(
            guess, color="#888888", linestyle=":", linewidth=1, label=f"{words}, {guess:.3f}"
        )
    axis.set_xlabel("step")
    axis.set_ylabel(metric.name)
    axis.set_xlim(0, result["planned_steps"] * 1.04)
    axis.grid(alpha=0.25)
    if any("epsilon" in m for m in metrics):
        spent = axis.twinx()
        spent.plot(
            [0, *steps],
            [0.0, *[m["epsilon"] for m in metrics]],
            color="#c0504d",
            linewidth=1.2,
            label="epsilon spent",
        )
        spent.set_ylabel(
            f"epsilon spent{per_unit(result.get('neighbouring', ADD_REMOVE))} "
            f"(delta = {round_up_to(result['delta'], 1)})",
            color="#c0504d",
        )
        spent.set_ylim(0, max(m["epsilon"] for m in metrics) * 1.25)
        spent.tick_params(axis="y", colors="#c0504d")
    axis.set_title(_title(result))
    axis.legend(loc="lower right", frameon=True, fontsize=9)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _title(result: dict[str, Any]) -> str:
    if not result["private"]:
        return "Training without privacy"
    declared = " (data declared public)" if result.get("data_declared_public") else ""
    unit = per_unit(result.get("neighbouring", ADD_REMOVE))
    return f"Private training, epsilon = {round_up(result['epsilon'], 4)}{unit}{declared}"
