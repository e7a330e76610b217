"""What a model draws while records are clipped (dropout, random depth), and the loop around it:
from the run's secret, anew at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from quietgrad.checks import listed, warn_of_half_precision
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.norms.coarseness import is_coarse, roundoff_of
from quietgrad.distributed.team import Team
from quietgrad.generators import KeyedByStep
from quietgrad.loading.unsaid import say_no_sizes
from quietgrad.plan.planned import Planned
from quietgrad.plan.process import BoundToProcess
from quietgrad.plan.session.noise_session import NoiseSession
from quietgrad.plan.session.stepping import Stepping
from quietgrad.plan.session.trained import Starts

# Records that are expected, of which there are none with probability exp(-40).
SURELY_SOME = 40.0


class DrawsForModels(BoundToProcess):
    """A run's seeds of the process's generators.

    Attributes:
        coarse_told: whether it was said that half precision takes part: once, by a door that knows
            the setting, or by the run.
    """

    _plan: Planned
    _session: NoiseSession
    _team: Team
    _released: int
    starts: Starts

    def __init__(self) -> None:
        super().__init__()
        self._model_draws, self._loop_draws = KeyedByStep(), KeyedByStep()
        self._stepping = Stepping()
        self.coarse_told = False
        self._coarse, self._expected = False, 0.0

    def model_seed(self) -> int:
        """What ``clip`` seeds torch's, numpy's and Python's generators with for the next release,
        where the model itself draws (dropout): a function of the session's secret root and the
        release's number. Secret. They are put back after each call.
        """
        return self._seed("")

    def _read_seed(self) -> int:
        """The same for records that are read for the next release."""
        return self._seed("reading")

    def _seed(self, what: str) -> int:
        self._require_own_process()
        share, _ = self._team.share
        name = what if share == 0 else f"{what} rank {share}".strip()
        return self._session.key.words("model", self._released, name)[0] >> 1

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """For passes over records of the open batch: parts of it go on in one stream."""
        say_no_sizes()
        keyed = self._model_draws.of(self._released, self.model_seed)
        with keyed, self._stepping.clipping():
            yield

    @contextlib.contextmanager
    def _looping(self, end: int = 0) -> Iterator[None]:
        """While a batch is open in a loop until release ``end``: what the loop itself draws for its
        records. Where it is left, those who wait for this rank hear of it.
        """
        say_no_sizes()
        seed = lambda: self._seed("loop")  # noqa: E731
        try:
            keyed = self._loop_draws.of(self._released, seed, with_the_scripts=True)
            with keyed, self._stepping.in_loop():
                yield
        except GeneratorExit:
            if self._released < end:
                self._team.loops("leaves", self._released)
            raise
        if self._released == end < self._plan.steps:
            self._team.loops("leaves", self._released)

    def _meets(self, model: nn.Module) -> None:
        """Records are clipped for a model: whose its weights are, and who may step on them."""
        if self.starts.met(model):
            self._stepping.met(p for p in model.parameters() if p.requires_grad)
            if not self._plan.data_are_public:
                self.coarse_told |= _warn_of_weights(model)

    def _tell_coarse(self, clipped: ClippedSum) -> None:
        """Where half precision took part in a sum, as under a loop's own autocast: before the first
        release is made by which so many records are expected that there were some for certain. An
        empty batch has no precision, and when it is told must not say that there was one.
        """
        if self.coarse_told or self._plan.data_are_public:
            return
        self._coarse |= max(clipped.private.least_times, default=1.0) > 1.0
        size = self._plan.batch_size_at(self._plan.at(self._released))
        self._expected += size / self._team.size
        if self._coarse and self._expected >= SURELY_SOME:
            self.coarse_told = True
            warn_of_half_precision(
                "a step that half precision takes part in (torch.autocast, or products of float32 "
                "that torch.set_float32_matmul_precision reduces)",
                "float32 throughout",
            )

    def _over(self) -> None:
        """Nothing more is released."""
        self.starts.over()
        self._stepping.over()


def _warn_of_weights(model: nn.Module) -> bool:
    """Of weights in half precision, as many checkpoints come, whatever autocast and Trainers say;
    whether there are any.
    In float16 AdamW's eps is 0, and so are most second moments: the weights would be lost, and with
    them what was spent.
    """
    narrow = [p for p in model.parameters() if is_coarse(roundoff_of([p.dtype]))]
    if not narrow:
        return False
    kinds = listed(sorted({str(p.dtype) for p in narrow}), "and")
    lost = any(p.requires_grad and p.dtype == torch.float16 for p in narrow)
    warn_of_half_precision(
        f"a model with weights of {kinds}{' (what AdamW makes NaN)' * lost}",
        "model.float(), or dtype=torch.float32 where it is loaded,",
    )
    return True
