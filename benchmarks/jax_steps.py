"""Steps in JAX for ``clipping_peers_jax.py``: without privacy, and clipped by JAX-Privacy.

Run by it with the file of a program (weights and a batch, written from the torch model) in the
environment. Loads neither torch nor Quietgrad.

Every step is compiled for its shapes before it is timed. A step's gradient is let go before the
next, as ``zero_grad`` does.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_models import MODELS, Arrays, own_layout
from turns import Step, added_mib, answer_steps, limit_memory

PROGRAM = "QUIETGRAD_JAX_PROGRAM"  # the environment variable
WHOLE = "jax-privacy"
PARTS = f"{WHOLE}-by-"
Function = Callable[[Arrays, Arrays, Arrays], Arrays]


def read_program() -> tuple[str, float, tuple[Arrays, Arrays, Arrays]]:
    """The model's name, the limit on memory in GiB, and: trained, frozen, batch."""
    parts: dict[str, Arrays] = {"trained": {}, "frozen": {}, "batch": {}}
    with np.load(os.environ[PROGRAM]) as file:
        model, limit = str(file["model"]), float(file["limit_gib"])
        for key in file.files:
            part, _, name = key.partition("/")
            if name:
                value = file[key]
                if part != "batch":
                    value = own_layout(name, value)
                elif value.ndim == 4:
                    value = value.transpose(0, 2, 3, 1)
                parts[part][name] = jnp.array(value)
    return model, limit, (parts["trained"], parts["frozen"], parts["batch"])


def function_of(method: str, model: str) -> Function:
    """What is compiled: a gradient of the mean loss, or JAX-Privacy's sum of clipped gradients, of
    the whole batch at once (``vmap``) or micro-batch by micro-batch.
    """

    def loss(trained: Arrays, frozen: Arrays, batch: Arrays) -> jax.Array:
        return MODELS[model](trained | frozen, batch).mean()

    if method == "non-private":
        return jax.grad(loss)
    from jax_privacy.clipping import clipped_grad

    size = None if method == WHOLE else int(method.removeprefix(PARTS))
    return clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=2, microbatch_size=size)


def compiled(method: str, model: str, arguments: tuple[Arrays, Arrays, Arrays]) -> Any:
    return jax.jit(function_of(method, model)).lower(*arguments).compile()


def step_of(function: Function, arguments: tuple[Arrays, Arrays, Arrays]) -> Step:
    held: list[Arrays] = []

    def step() -> None:
        held.clear()
        held.append(function(*arguments))
        jax.block_until_ready(held)

    return step


def figures_of(method: str) -> dict[str, float]:
    """Memory in MiB: what two steps added to the process, and what XLA says that it takes for the
    gradient and for all between. Seconds of compiling.
    """
    model, limit, arguments = read_program()
    limit_memory(limit)
    started = time.perf_counter()
    function = compiled(method, model, arguments)
    seconds = time.perf_counter() - started
    ctypes.CDLL(None).malloc_trim(0)  # what compiling used and freed would hide what steps use
    xla = function.memory_analysis()
    return {
        "added_memory_mib": added_mib(step_of(function, arguments)),
        "xla_memory_mib": (xla.temp_size_in_bytes + xla.output_size_in_bytes) / 2**20,
        "compile_seconds": seconds,
    }


def worker(method: str) -> None:
    """The other side of ``turns.Worker``."""

    def ready() -> Step:
        model, limit, arguments = read_program()
        limit_memory(limit)
        return step_of(compiled(method, model, arguments), arguments)

    answer_steps(ready)


def write_results(path: Path, method: str) -> None:
    """Losses and gradients for the comparison with torch, in torch's layout."""
    model, limit, arguments = read_program()
    limit_memory(limit)
    trained, frozen, batch = arguments
    losses = jax.jit(MODELS[model])(trained | frozen, batch)
    found = compiled(method, model, arguments)(*arguments)
    gradients = {n: own_layout(n, np.asarray(g), back=True) for n, g in found.items()}
    np.savez(path, **{"..losses": np.asarray(losses)}, **gradients)


def main() -> None:
    task, regime_or_path, method = sys.argv[1:]
    if task == "--worker":
        worker(method)
    elif task == "--figures-of":
        print(json.dumps(figures_of(method)))
    else:
        write_results(Path(regime_or_path), method)


if __name__ == "__main__":
    main()
