"""Figure of runs of sft_smollm2.py: perplexity of public tweets by step, and what training gained
on every secret, planted or not.

    python examples/sft_figure.py sft.png runs/sft/result.json runs/control/result.json
"""

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

COLOURS = ("#1f5fa8", "#c0504d")


def name_of(result):
    if result["settings"]["noise"] is None:
        return f"epsilon {result['epsilon']:.2f}"
    return f"almost no noise (epsilon {result['epsilon']:.0f})"


def draw(path, results):
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    course, secrets = figure.subplots(1, 2)
    scattered = np.random.default_rng(0)
    ticks = []
    for place, (result, colour) in enumerate(zip(results, COLOURS)):
        points = sorted((int(step), value) for step, value in result["perplexity"].items())
        course.plot(*zip(*points), "o-", color=colour, markersize=4, label=name_of(result))
        gains, coins = (np.array(result["audit"][key]) for key in ("gains", "coins"))
        for planted in (1, 0):
            own = gains[coins == planted]
            at = 2 * place + (1 - planted)
            ticks.append((at, f"{'planted' if planted else 'left out'}\n{name_of(result)}"))
            x = at + scattered.uniform(-0.15, 0.15, len(own))
            secrets.plot(x, own, "o" if planted else "x", color=colour, markersize=4, alpha=0.6)
            secrets.plot([at - 0.25, at + 0.25], [own.mean()] * 2, color="#222222", linewidth=1.5)
    course.set_xlabel("steps")
    course.set_ylabel("perplexity of 100 public tweets")
    course.legend(frameon=False)
    secrets.set_ylabel("nats that training gained on ten digits")
    secrets.set_xticks(*zip(*ticks), fontsize=8)
    for axes in (course, secrets):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    draw(sys.argv[1], [json.loads(Path(one).read_text()) for one in sys.argv[2:]])
