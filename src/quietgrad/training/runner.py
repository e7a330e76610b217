"""The plain training loop: drives a prepared run, keeps its records, and can be stopped and resumed at any moment."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.accounting import epsilon
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.plan import PrivateRun
from quietgrad.randomness import RandomKey
from quietgrad.tensors import trainable_parameters
from quietgrad.training.evaluation import final_metrics, score_of
from quietgrad.training.metrics import ACCURACY
from quietgrad.training.models import parameter_digest, save_classifier, trainable_count
from quietgrad.training.noise_state import forget_keys, start_private
from quietgrad.training.optimizers import build_denoiser, build_optimizer, step_on_release
from quietgrad.training.prepare import Prepared
from quietgrad.training.records import Records, spread
from quietgrad.training.run_dir import RunDir, environment


@dataclass(frozen=True)
class Progress:
    """What a progress bar may show: public facts only."""

    step: int
    steps: int
    epsilon: float
    score: float | None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: finished, or interrupted with everything saved."""

    result: dict[str, Any]
    interrupted: bool


def train(prepared: Prepared, run_dir: RunDir, resume: bool, report: Callable[[Progress], None]) -> Outcome:
    """Runs all steps that remain.

    Args:
        prepared: from ``prepare``.
        run_dir: from ``open_run_dir``.
        resume: go on from the directory's checkpoint; releases that the ledger holds beyond it are spent, and not made up for.
        report: called after every step with public facts.

    Returns:
        The result record, also written to the run directory.

    Raises:
        ValueError: a resume with changed privacy settings.
        RuntimeError: if no trainable tensor moved, or a frozen one did.
    """
    classifier = prepared.model.classifier
    loop = _Loop(prepared, run_dir)
    if not resume:
        run_dir.config.write_text(prepared.config.to_toml(), encoding="utf-8")
    private = start_private(prepared.plan, run_dir) if prepared.plan is not None else None
    with contextlib.ExitStack() as stack:
        if private is not None:
            stack.enter_context(private)
        if resume and private is None and run_dir.ledger.exists():
            raise ValueError(
                f"cannot resume {str(run_dir.path)!r} without privacy: it is a private run; set privacy.enabled=true, or begin a new run directory"
            )
        done, made = loop.restore() if resume else 0, 0
        if private is not None:
            if private.released < done:
                raise ValueError(
                    f"cannot resume: the checkpoint in {str(run_dir.path)!r} is at step {done}, but the ledger counts {private.released} releases: the ledger is "
                    "not the one of this run, or lost lines, and nothing can be claimed; restore it, or begin a new run directory"
                )
            # Releases that the ledger holds beyond the checkpoint are spent: training goes on at the next number.
            done = max(done, private.released)
        run_dir.write_json(run_dir.environment, environment())
        before = parameter_digest(classifier)
        stop = stack.enter_context(_stop_on_signal())
        shown = _ShownEpsilon(prepared)
        batches = private.batches() if private is not None else _plain_batches(prepared, done)
        for indices in batches:
            step = private.released if private is not None else done
            if private is not None:
                loop.advance(step, loop.released_gradients(private, indices))
            else:
                loop.plain_gradients(indices)
                loop.advance(step, None)
            done, made = step + 1, made + 1
            score = loop.evaluate_on_schedule(done, private)
            report(Progress(done, prepared.steps, shown.at(done), score))
            if done % prepared.config.training.checkpoint_every == 0 or stop.requested:
                loop.save(done)
            if stop.requested and done < prepared.steps:
                return Outcome(_summary(prepared, run_dir, done, None), interrupted=True)
        loop.save(done)
        forget_keys(run_dir)
        _require_movement(classifier, before, made)
        return Outcome(loop.finish(done), interrupted=False)


class _Loop:
    """The mutable part: model, optimiser and files."""

    def __init__(self, prepared: Prepared, run_dir: RunDir) -> None:
        self.prepared = prepared
        self.run_dir = run_dir
        self.model = prepared.model.classifier
        # With a frozen lower part, training starts from cached states; evaluation always runs the whole model.
        self.cache = prepared.prefix_cache()
        self.trained: nn.Module = self.model if self.cache is None else self.cache.upper
        self.loss = prepared.loss()
        config = prepared.config
        self.denoiser = build_denoiser(config.denoising) if prepared.plan is not None else None
        self.optimizer, self.schedule = build_optimizer(self.trained, config.optimizer, prepared.steps, self.denoiser)
        every = prepared.config.training.eval_records
        self.eval_part = (
            prepared.validation.subset(spread(prepared.validation, every)) if every else prepared.validation
        )

    def micro_batches(self, indices: Any) -> Iterator[dict[str, Tensor]]:
        size = self.prepared.config.clipping.max_physical_batch_size
        for part in self.prepared.train.micro_batch_indices(indices, size):
            yield self.collate(part)

    def released_gradients(self, private: PrivateRun, indices: Any) -> NoisySum:
        total: ClippedSum | None = None
        for batch in self.micro_batches(indices):
            part = private.clip(self.trained, self.loss, batch)
            total = part if total is None else total + part
        if total is None:  # an empty batch is a legal step: its sum is zero, and it gets noise like any other
            total = private.clip(self.trained, self.loss, self.collate(indices))
        return private.release(total)

    def plain_gradients(self, indices: Any) -> None:
        self.optimizer.zero_grad()
        for batch in self.micro_batches(indices):
            (self.loss(self.trained, batch).sum() / self.prepared.expected_batch_size).backward()

    def collate(self, indices: Any) -> dict[str, Tensor]:
        source = self.prepared.train if self.cache is None else self.cache
        return source.collate(indices, self.prepared.device)

    def advance(self, step: int, noisy: NoisySum | None) -> None:
        self.schedule(step)
        if noisy is not None:
            step_on_release(self.optimizer, self.denoiser, self.trained, noisy, self.prepared.expected_batch_size)
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def score(self, part: Records) -> float:
        return score_of(self.prepared, self.model, part)

    def evaluate_on_schedule(self, done: int, private: PrivateRun | None) -> float | None:
        every = self.prepared.config.training.eval_every
        if not every or (done % every and done != self.prepared.steps):
            return None
        score = self.score(self.eval_part)
        record = {
            "step": done,
            f"validation_{self.prepared.metric.key}": score,
            "validation_records": len(self.eval_part),
        }
        if private is not None:
            record["epsilon"] = private.epsilon()
        self.run_dir.append_metrics(record)
        return score

    def save(self, done: int) -> None:
        trainable = {name: p.detach().cpu() for name, p in trainable_parameters(self.model).items()}
        state = {
            "step": done,
            "trainable": trainable,
            "fixed_head": {name: p.detach().cpu() for name, p in _fixed_head(self.model).items()},
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }
        temporary = self.run_dir.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.run_dir.checkpoint)

    def restore(self) -> int:
        if not self.run_dir.checkpoint.is_file():
            return 0  # stopped before the first checkpoint: the ledger still counts what was released
        state = torch.load(self.run_dir.checkpoint, weights_only=True)
        parameters = trainable_parameters(self.model)
        shapes = {name: p.shape for name, p in parameters.items()}
        if shapes != {name: value.shape for name, value in state["trainable"].items()}:
            raise ValueError(
                "resume with a changed model: its trainable parameters are not those of the checkpoint; use the settings of the first start"
            )
        with torch.no_grad():
            for name, value in state["trainable"].items():
                parameters[name].copy_(value)
            for name, value in state.get("fixed_head", {}).items():
                _fixed_head(self.model)[name].copy_(value)
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, ValueError) as error:
            raise ValueError(
                "resume with a changed optimiser: its state is not that of the checkpoint; use the settings of the first start"
            ) from error
        torch.set_rng_state(state["torch_rng"])
        return int(state["step"])

    def finish(self, done: int) -> dict[str, Any]:
        prepared, run_dir = self.prepared, self.run_dir
        metrics = final_metrics(prepared)
        save_classifier(prepared.model, prepared.task.label_names, run_dir.model)
        result = _summary(prepared, run_dir, done, metrics)
        run_dir.write_json(run_dir.result, result)
        return result


def _fixed_head(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a frozen head: drawn at random or fitted before training began, so that a resumed run could not make them again."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Module):
        return {}
    return {name: p for name, p in head.named_parameters() if not p.requires_grad}


def _summary(prepared: Prepared, run_dir: RunDir, done: int, metrics: dict[str, float] | None) -> dict[str, Any]:
    plan = prepared.plan
    result: dict[str, Any] = {
        "epsilon": None if plan is None else _epsilon_so_far(prepared, done),
        "delta": None if plan is None else plan.delta,
        "private": plan is not None,
        "steps": done,
        "planned_steps": prepared.steps,
        "metrics": metrics or {},
        "run_dir": str(run_dir.path),
        "metric": prepared.metric.key,
        **_guessing(prepared),
        "trainable_parameters": trainable_count(prepared.model.classifier),
        "records": {"train": len(prepared.train), "validation": len(prepared.validation), "test": len(prepared.test)},
    }
    if plan is not None:
        result["noise_multiplier"] = plan.noise_multiplier
        result["sample_rate"] = plan.event.sample_rate
        result["neighbouring"] = plan.neighbouring
        if plan.config.seed is not None:
            result["seed_warning"] = (
                "the noise is reproducible from the seed: the guarantee holds only if the seed stays secret and serves one run"
            )
    return result


def _guessing(prepared: Prepared) -> dict[str, float]:
    """What the class most frequent among validation records, which are public, would score."""
    if prepared.metric is not ACCURACY:
        return {}
    most = np.bincount(prepared.validation.labels).argmax()
    return {"majority_accuracy": float((prepared.test.labels == most).mean())}


def _epsilon_so_far(prepared: Prepared, done: int) -> float:
    if prepared.plan is None:
        return float("inf")
    if done == prepared.steps:
        return prepared.plan.epsilon
    return epsilon(prepared.plan.event.after(done), prepared.plan.delta) if done else 0.0


class _ShownEpsilon:
    """Epsilon for the progress bar: computed at twentieths of the run and rounded up to the next one, still an upper bound."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._stride = max(1, -(-prepared.steps // 20))
        self._known: dict[int, float] = {}

    def at(self, done: int) -> float:
        step = min(-(-done // self._stride) * self._stride, self._prepared.steps)
        if step not in self._known:
            self._known[step] = _epsilon_so_far(self._prepared, step)
        return self._known[step]


def _plain_batches(prepared: Prepared, done: int) -> Iterator[Any]:
    seed = prepared.config.training.seed
    key = RandomKey.from_entropy() if seed is None else RandomKey.from_seed(seed)
    for step in range(done, prepared.steps):
        yield prepared.sampler.indices(key, step)


def _require_movement(classifier: nn.Module, before: dict[str, Tensor], steps: int) -> None:
    """Training that moves nothing, or moves what is frozen, must not look like success."""
    after = parameter_digest(classifier)
    moved = {name for name, digest in after.items() if not torch.equal(digest, before[name])}
    trainable = set(trainable_parameters(classifier))
    if steps and not moved & trainable:
        raise RuntimeError(
            f"after {steps} steps no trainable tensor has moved; check learning rates and the optimiser's parameters"
        )
    wrong = sorted(moved - trainable)
    if wrong:
        raise RuntimeError(
            f"the frozen tensor {wrong[0]!r} has moved during training ({len(wrong)} of them); something writes to it outside the optimiser"
        )


@dataclass
class _Stop:
    requested: bool = False


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[_Stop]:
    """The first Ctrl-C or SIGTERM ends the run after the current step, saved; a second Ctrl-C ends it at once."""
    stop = _Stop()

    def handle(number: int, frame: Any) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    previous: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread
                previous[int(number)] = signal.signal(number, handle)
        yield stop
    finally:
        for which, old in previous.items():
            signal.signal(which, old)
