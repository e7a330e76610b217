"""The run's figure: validation accuracy and privacy spent, against steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def accuracy_figure(metrics: list[dict[str, Any]], result: dict[str, Any], reference: float | None, path: Path) -> None:
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
    accuracy = [m["validation_accuracy"] for m in metrics]
    axis.plot(steps, accuracy, "o-", color="#1f5fa8", label="validation accuracy")
    final = result["metrics"].get("accuracy")
    if final is not None:
        axis.plot([result["steps"]], [final], "D", color="#0b2e59", markersize=8, label=f"test accuracy, {final:.3f}")
    if reference is not None:
        axis.axhline(reference, color="#3a7d44", linestyle="--", linewidth=1, label=f"without privacy, {reference:.3f}")
    axis.axhline(
        result["majority_accuracy"],
        color="#888888",
        linestyle=":",
        linewidth=1,
        label=f"majority class, {result['majority_accuracy']:.3f}",
    )
    axis.set_xlabel("step")
    axis.set_ylabel("accuracy")
    axis.set_xlim(0, result["planned_steps"] * 1.04)
    axis.grid(alpha=0.25)
    if any("epsilon" in m for m in metrics):
        spent = axis.twinx()
        spent.plot(
            [0, *steps], [0.0, *[m["epsilon"] for m in metrics]], color="#c0504d", linewidth=1.2, label="epsilon spent"
        )
        spent.set_ylabel(f"epsilon spent (delta = {result['delta']:.0e})", color="#c0504d")
        spent.set_ylim(0, max(m["epsilon"] for m in metrics) * 1.25)
        spent.tick_params(axis="y", colors="#c0504d")
        title = f"Private fine-tuning, epsilon = {result['epsilon']:.2f}"
    else:
        title = "Fine-tuning without privacy"
    axis.set_title(title)
    axis.legend(loc="lower right", frameon=True, fontsize=9)
    figure.savefig(path, dpi=140)
    plt.close(figure)
