"""The plain training loop: drives a prepared run, keeps its records, and can be stopped and resumed
at any moment.
"""

from __future__ import annotations

import contextlib
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quietgrad.averaging import ExponentialAverage
from quietgrad.beside import PrivateEstimate
from quietgrad.clipping.capture.examples import Examples
from quietgrad.distributed.together import Together
from quietgrad.durable import write_whole
from quietgrad.ledger import LedgerContents, read_ledger
from quietgrad.plan import PrivateRun
from quietgrad.plan.seeds import root_key
from quietgrad.training.evaluation import Evaluator
from quietgrad.training.files.changed import require_first_settings, start_of
from quietgrad.training.files.checkpoint import (
    Restored,
    require_counted,
    restore_checkpoint,
    save_checkpoint,
)
from quietgrad.training.files.events import EventFile
from quietgrad.training.files.noise_state import (
    NoiseKeeper,
    forget_keys,
    without_seed,
)
from quietgrad.training.files.run_dir import RunDir, environment
from quietgrad.training.optimizers import build_optimizer, step_on_release
from quietgrad.training.prepare import Prepared
from quietgrad.training.result import ShownEpsilon, result_of, trained_on
from quietgrad.training.sharding.model import shards_of
from quietgrad.training.tasks.loaded import parameter_digest, require_movement
from quietgrad.training.tasks.records import Told, spread, unheard

# Validation records that the clipper's guard examines.
GUARDED_RECORDS = 32


@dataclass(frozen=True)
class Progress:
    """What a progress bar may show: public facts only; ``training_loss`` was released with
    noise.
    """

    step: int
    steps: int
    epsilon: float
    score: float | None
    training_loss: PrivateEstimate | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: finished, or interrupted with everything saved.

    Attributes:
        result: what was written to the run directory.
        interrupted: whether steps remain.
        made: steps of this session.
    """

    result: dict[str, Any]
    interrupted: bool
    made: int


def train(
    prepared: Prepared,
    run_dir: RunDir,
    resume: bool,
    report: Callable[[Progress], None],
    say: Callable[[str], None] = warnings.warn,
    told: Told = unheard,
    together: Together | None = None,
) -> Outcome:
    """Runs all steps that remain.

    Args:
        prepared: from ``prepare``.
        run_dir: from ``open_run_dir``.
        resume: go on from the directory's checkpoint; releases that the ledger holds beyond it are
            spent, and not made up for.
        report: called after every step with public facts.
        say: called with a line on what a resume found and went on without.
        told: called while frozen layers run over the records, with how many are done and of how
            many; where users are protected, not at all.
        together: the processes that train; the first alone writes to the directory, which all read.

    Returns:
        The result record, also written to the run directory.

    Raises:
        ValueError: a resume with changed privacy settings or without its ledger; a directory that
            is in use.
        RuntimeError: if the ledger can no longer be written, no trainable tensor moved, or a frozen
            one did.
    """
    classifier, together = prepared.model.classifier, together or Together()
    require_first_settings(prepared, run_dir, resume, together)
    loop = _Loop(prepared, run_dir, together, told)
    with contextlib.ExitStack() as stack:

        def take() -> None:
            # Locked first, written after; what was seen before the lock may have changed.
            stack.enter_context(run_dir.locked())
            run_dir.require_state(resume)
            if not resume:
                write_whole(run_dir.config, without_seed(prepared.config).to_toml().encode())

        together.by_first(take)
        if resume and prepared.plan is None and run_dir.ledger.exists():
            raise ValueError(
                f"cannot resume {str(run_dir.path)!r} without privacy: it is a private run; set "
                "privacy.enabled=true, or begin a new run directory"
            )
        # Before the start is recorded: what cannot be gone on from counts none.
        restore = (lambda: loop.restore(say)) if resume else Restored
        restored = together.all_of(restore, "read the checkpoint")
        done, made = restored.step, 0
        private = None
        if prepared.plan is not None:
            together.by_first(lambda: require_counted(run_dir, restored))
            private = start_of(prepared, run_dir, resume, together)
            private.coarse_told = prepared.config.training.precision != "float32"  # by ``prepare``
            stack.enter_context(private)
            # Releases beyond the checkpoint are spent: training goes on at the next number.
            restored.say_what_is_lost(private.released, say)
            done = max(done, private.released)
            if together.first:
                loop.ledger = read_ledger(run_dir.ledger)
        keeper = NoiseKeeper(private)
        if together.first:
            run_dir.write_json(run_dir.environment, environment())
        before = parameter_digest(classifier)
        stop = stack.enter_context(_stop_on_signal())
        shown = ShownEpsilon(prepared)
        if private is not None:
            guard_on_public_records(prepared, private, loop.trained, loop.loss, loop.cache)
        if done < prepared.steps and together.first:
            run_dir.forget_end()  # an extended run's: what was said of it is true no longer
        batches = private.batches() if private is not None else _plain_batches(prepared, done)
        for indices in batches if done < prepared.steps else ():
            step = private.released if private is not None else done
            if private is None:
                torch.manual_seed(model_seed(prepared, step))
            loop.step(step, private, indices)
            done, made = step + 1, made + 1
            score = loop.evaluate_on_schedule(done, private)
            loss = None if private is None else private.training_loss
            report(Progress(done, prepared.steps, shown.at(done), score, loss))
            stopping = together.any_of(stop.requested)
            if done % prepared.config.training.checkpoint_every == 0 or stopping:
                loop.save(done)
                keeper.keep(stopping)
            if stopping and done < prepared.steps:
                return Outcome(result_of(prepared, run_dir, done, None), True, made)
        loop.save(done)
        require_movement(classifier, before, made)
        if together.first:
            forget_keys(run_dir)
        return Outcome(loop.finish(done), False, made)


class _Loop:
    """The mutable part: model, optimiser and files."""

    def __init__(self, prepared: Prepared, run_dir: RunDir, together: Together, told: Told) -> None:
        self.prepared = prepared
        self.together = together
        self.writes = together.first
        self.ledger = LedgerContents()  # as it was when this start was written down
        self.run_dir = run_dir
        self.model = prepared.model.classifier
        self.sharded = shards_of(prepared, together)
        # Passes through a sharded model are made by all.
        self.evaluates = self.writes or self.sharded is not None
        # With a frozen lower part, training and evaluation start from cached states.
        self.cache = prepared.prefix_cache(told=told)
        self.evaluator = Evaluator(prepared, cached=self.cache is not None)
        self.trained: nn.Module = self.model if self.cache is None else self.cache.upper
        self.loss = prepared.loss()
        config = prepared.config
        rule = config.momentum_rule if prepared.plan is not None else None
        built = build_optimizer(self.trained, config.optimizer, prepared.steps, rule)
        self.optimizer, self.schedule = built
        self.events = EventFile.where_installed(run_dir.path, config.training.tensorboard)
        decay = config.training.averaging
        self.average = ExponentialAverage(self.model, decay) if decay else None

    def step(self, step: int, private: PrivateRun | None, indices: Any) -> None:
        noisy = None
        if private is None:
            self.plain_gradients(indices, self.prepared.batch_size_at(step))
        else:
            batches = self.prepared.micro_batches(indices, self.cache)
            noisy = private.backward(self.trained, self.loss, batches)
        self.schedule(step)
        step_on_release(self.optimizer, noisy)
        if self.average is not None:
            self.average.update()

    def plain_gradients(self, indices: Any, size: float) -> None:
        self.optimizer.zero_grad()
        if not len(indices):  # no gradient, rather than a zero one: a moment stays as it is
            return
        for batch in self.prepared.micro_batches(indices, self.cache):
            examples = Examples.of(batch, 1, self.prepared.combined)
            losses = examples.averaged(self.loss(self.trained, examples.rows))
            (losses.sum() / size).backward()

    def evaluate_on_schedule(self, done: int, private: PrivateRun | None) -> float | None:
        every = self.prepared.config.training.eval_every
        if not self.evaluates or not every or (done % every and done != self.prepared.steps):
            return None
        key = self.prepared.metric.key
        score = self.evaluator.between_steps()
        record: dict[str, Any] = {
            "step": done,
            f"validation_{key}": score,
            "validation_records": self.evaluator.scheduled_records,
        }
        if self.average is not None:
            with self.average.applied():
                averaged = self.evaluator.between_steps()
            record[f"averaged_validation_{key}"] = averaged
            score = max(score, averaged)
        if private is not None:
            record |= {"epsilon": private.epsilon(), **private.shown()}
            if self.prepared.combined is not None:
                record["unit"] = "user"
            if self.prepared.config.data.public:
                record["data_declared_public"] = True
        if self.writes:
            self.run_dir.append_metrics(record)
            if self.events is not None:
                self.events.add(record)
        return score

    def save(self, done: int) -> None:
        if self.evaluates:
            given = (self.model, self.optimizer, done, self.average, self.writes)
            made = (self.ledger.makers(done), self.prepared.task.learnt)
            save_checkpoint(self.run_dir, *given, *made)

    def restore(self, say: Callable[[str], None]) -> Restored:
        given = (self.model, self.optimizer, say, self.average, self.prepared.task.learnt)
        return restore_checkpoint(self.run_dir, *given)

    def finish(self, done: int) -> dict[str, Any]:
        """Scores, saves, and says how it went; on the first process."""
        if not self.evaluates:
            return {}
        prepared, run_dir = self.prepared, self.run_dir
        averaged = self.choose_weights()
        scores = self.evaluator.final_scores()
        model = prepared.model
        if self.sharded is not None:
            model = replace(model, classifier=self.sharded.whole(self.writes))
        if not self.writes:
            return {}
        with run_dir.new_model() as folder:
            prepared.task.save(model, folder, trained_on(prepared, done, self.ledger))
        result = result_of(prepared, run_dir, done, scores)
        if self.average is not None:
            result["weights"] = "averaged" if averaged else "last"
        run_dir.write_json(run_dir.result, result)
        return result

    def choose_weights(self) -> bool:
        """Whether the average became the model: where validation records, which are public, do not
        prefer the last weights.
        """
        if self.average is None:
            return False
        last = self.evaluator.on_validation()
        with self.average.applied():
            better = self.evaluator.on_validation() >= last
        if self.sharded is not None:  # on other machines the last bits may differ
            better = self.together.of_first(better)
        if better:
            self.average.write()
        return better


def guard_on_public_records(
    prepared: Prepared, private: PrivateRun, model: nn.Module, loss: Any, cache: Any
) -> None:
    """The clipper's guard looks at validation records, so that its refusal says nothing of private
    ones. Where training starts from cached states there are none: the library's own upper part is
    examined on its batches.
    """
    count = min(len(prepared.validation), GUARDED_RECORDS)
    if cache is None and count > 1:
        batch = prepared.validation.collate(spread(prepared.validation, count), prepared.device)
        private.check(model, loss, batch)


def model_seed(prepared: Prepared, step: int) -> int:
    """What torch's own generators are seeded with before a step without privacy, for what the model
    draws (dropout); a private run keys them by itself.

    Keyed by step, they hold no state that a resume would have to save.
    """
    return root_key(prepared.config.training.seed).words("model", step)[0] >> 1


def _plain_batches(prepared: Prepared, done: int) -> Iterator[Any]:
    key = root_key(prepared.config.training.seed)
    for step in range(done, prepared.steps):
        yield prepared.sampler.at(prepared.course.at(step).sample_rate).batch(key, step)


@dataclass
class _Stop:
    requested: bool = False


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[_Stop]:
    """The first Ctrl-C or SIGTERM ends the run after the current step, saved; a second Ctrl-C ends
    it at once.
    """
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
