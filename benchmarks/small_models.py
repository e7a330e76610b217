"""Time of a step where arithmetic is nothing: small models, and what a step costs beside a GPU.

    python benchmarks/small_models.py [--repeats 15] [--models mlp head ...]
                                      [--output benchmarks/results/small_models.json]

A table's network, a head on embeddings, a tutorial's network for digits, and BERT and Llama of many
layers that are 32 wide: their matrices are so small that a step's time is that of calls and Python.
Forward and backward pass to a gradient (non-private) or a clipped sum, as in ``clipping_peers.py``,
whose methods these are: each in a process of its own, which takes so many steps in turn that they
last some tens of milliseconds. Reported are milliseconds a step, processor time, medians over
rounds, and ratios to the non-private step of the same round. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from clipping_peers import METHODS, PACKAGES, Batch, installed, measure_time, with_lora
from torch import nn
from turns import Step, Worker, answer_steps

COMPARED = ["quietgrad", "quietgrad-hutch", "opacus-hooks", "opacus-ghost", "opake"]
OUTPUT = Path("benchmarks/results/small_models.json")
WIDTH = 32


def classified(model: nn.Module, x: torch.Tensor, classes: int) -> tuple[nn.Module, Batch]:
    return model, {"x": x, "y": torch.randint(0, classes, (len(x),))}


def mlp() -> tuple[nn.Module, Batch]:
    """The README's ten lines: 200 rows of a table with ten columns."""
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    return classified(model, torch.randn(200, 10), 2)


def head() -> tuple[nn.Module, Batch]:
    """A linear head on 512 embeddings of MiniLM's width."""
    return classified(nn.Linear(384, 3), torch.randn(512, 384), 3)


def digits() -> tuple[nn.Module, Batch]:
    """The network of the tutorials of DP-SGD on MNIST, 256 images."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    return classified(model, torch.randn(256, 1, 28, 28), 10)


def bert() -> tuple[nn.Module, Batch]:
    """Twelve layers, 4 texts of 8 tokens."""
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=12, num_attention_heads=2,
        intermediate_size=2 * WIDTH, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    ids = torch.randint(5, 50, (4, 8))
    return hf.BertForSequenceClassification(config), {
        "input_ids": ids,
        "position_ids": torch.arange(8).expand(4, 8).contiguous(),
        "token_type_ids": torch.zeros_like(ids),
        "y": torch.randint(0, 3, (4,)),
    }


def llama_lora() -> tuple[nn.Module, Batch]:
    """Eight layers with adapters on each, 4 texts of 8 tokens."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, num_hidden_layers=8, num_attention_heads=2,
        intermediate_size=2 * WIDTH, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(5, 60, (4, 8))
    return with_lora(hf.LlamaForCausalLM(config)), {"input_ids": ids, "y": ids}


# Model -> how it is made, and steps a turn.
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Batch]], int]] = {
    "mlp": (mlp, 50),
    "head": (head, 50),
    "digits": (digits, 3),
    "bert": (bert, 5),
    "llama-lora": (llama_lora, 5),
}


def worker(name: str, method: str) -> None:
    """The other side of ``Worker``."""
    torch.set_num_threads(1)
    make, steps = MODELS[name]

    def ready() -> Step:
        torch.manual_seed(0)
        step = METHODS[method](*make())

        def several() -> None:
            for _ in range(steps):
                step()

        return several

    answer_steps(ready)


def worker_of(name: str, method: str) -> Worker:
    return Worker(name, method, Path(__file__))


def measured(name: str, methods: list[str], repeats: int) -> dict[str, Any]:
    found = measure_time(name, methods, repeats, worker_of)
    steps = MODELS[name][1]
    plain = found["processor_seconds_non_private"] / steps * 1e3
    rows = {
        method: {
            "ratio": round(row["processor_time_ratio"], 2),
            "milliseconds": round(row["processor_time_ratio"] * plain, 3),
            "rounds": row["rounds"],
        }
        for method, row in found["methods"].items()
    }
    return {"steps_a_turn": steps, "methods": rows, "failed": found["failed"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=COMPARED, choices=list(METHODS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.worker:
        worker(*arguments.worker)
        return
    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "threads": 1,
            "load_at_start": round(os.getloadavg()[0], 2),
            **{name: installed(name) for name in PACKAGES},
        },
        "models": {},
    }
    methods = ["non-private", *(m for m in arguments.methods if m != "non-private")]
    for name in arguments.models:
        found = measured(name, methods, arguments.repeats)
        report["models"][name] = found
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for method, row in found["methods"].items():
            print(f"{name:12s} {method:16s} {row['milliseconds']:9.2f} ms  {row['ratio']:6.2f}")
        for method, why in found["failed"].items():
            print(f"{name:12s} {method:16s} {why}")


if __name__ == "__main__":
    main()
