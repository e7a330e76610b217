"""The noise of one session of a run: which roots draw it, where its block began, and its state.

A block is a stretch of releases whose noise is correlated (``quietgrad.noise.mechanism``).
Independent noise has no past, so of all this it needs the roots alone.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.ledger import LedgerWriter
from quietgrad.noise.mechanism import GaussianNoise, NoiseHistory
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.noise.shards import locals_of, places_of, spread_again
from quietgrad.noise.sources.stretch import Columns, Stretch
from quietgrad.plan.session.kept_rows import load_rows, save_rows
from quietgrad.plan.session.places import Places
from quietgrad.plan.session.starts import Begun
from quietgrad.randomness import RandomKey

Held = dict[str, tuple[tuple[int, ...], Stretch | Columns | None]]


class NoiseSession:
    """Roots, block and history of the noise. Secret: with them the noise can be subtracted.

    A step is ``join``, which may draw the block's earlier noise again, then the ledger's line, then
    ``cover``: what is written down was not drawn before.

    Args:
        noise: the plan's mechanism.
        begun: roots by step, and the block that goes on or begins.
        writer: of the run's ledger, which is told of new blocks and of how noise is drawn.
        rows: secret file for the last rows of correlated noise; None keeps none.
        places: whether records lie where they lay; None where it does not matter.
    """

    def __init__(
        self,
        noise: GaussianNoise,
        begun: Begun,
        writer: LedgerWriter | None = None,
        rows: Path | None = None,
        places: Places | None = None,
    ) -> None:
        self._noise = noise
        self._places = places
        self._ring = begun.ring
        self._block = begun.block
        self._drawn = begun.drawn
        self._writer = writer
        self._rows = rows
        self._history: NoiseHistory | None = None
        self._held: Held = {}  # what the history's rows are of

    @property
    def key(self) -> RandomKey:
        """The root of this session: of all that is drawn from now on."""
        return self._ring.sessions[-1].root

    def require_places(self, dataset: Any) -> None:
        """Of records that a loader reads; see ``Places``."""
        if self._places is not None:
            self._places.require(dataset)

    def require_fine_grid(self, clipped: ClippedSum, noise_multiplier: float) -> None:
        """See ``GaussianNoise.require_fine_grid``; ``clipped`` holds all trainable parameters."""
        entries = sum(g.numel() for g in clipped.gradients.values())
        self._noise.at(noise_multiplier).require_fine_grid(clipped.claim, entries)

    def join(
        self, like: Mapping[str, Tensor], step: int, own: Mapping[str, Tensor] | None = None
    ) -> None:
        """Brings the state to ``step``, if it is not there: at the first release here, where the
        one before failed, and where this process holds other parts than before (a layer that was
        cut over ranks since, or is whole again): rows of others are no noise of these.

        Args:
            like: tensors in the shape, dtype and device of the gradients.
            step: number of the release.
            own: those of ``like`` whose noise this process draws; None: all.
        """
        own = like if own is None else own
        changed = self._drawn is not None and self._drawn != self.how(like)
        held = _held(own)
        if self._history is None or self._history.step != step or changed or held != self._held:
            self._history, self._held = self._rejoined(like, step, own), held

    def cover(
        self,
        clipped: ClippedSum,
        noise_multiplier: float | None = None,
        entries: int | None = None,
        with_beside: bool = True,
    ) -> NoisySum:
        """Draws the noise of the step that was joined, and adds it.

        Args:
            clipped: the batch's sum. Private.
            noise_multiplier: of this step; None takes the mechanism's.
            entries, with_beside: see ``GaussianNoise.update``.
        """
        assert self._history is not None
        noise = self._noise if noise_multiplier is None else self._noise.at(noise_multiplier)
        sums, key_of = clipped.gradients, self._ring.key_of
        held = replace(clipped, gradients=locals_of(sums), stamp=None)
        noisy, self._history = noise.of(places_of(sums)).update(
            held, key_of, self._history, entries, with_beside
        )
        return replace(noisy, gradients=spread_again(noisy.gradients, sums))

    def keep(self) -> None:
        """Writes the last rows to the secret file, where there are any and a file was given."""
        history = self._history
        if self._rows is None or history is None or not history.rows:
            return
        assert self._drawn is not None
        try:
            save_rows(self._rows, self._noise, history, self._drawn, self._ring.sessions)
        except (OSError, RuntimeError) as error:  # torch's own of a full disk says nothing of it
            raise RuntimeError(
                f"{str(self._rows)!r}, the rows of correlated noise beside keys=, cannot be "
                f"written ({getattr(error, 'strerror', None) or 'the disk may be full'}); make "
                "room on the disk. The run may go on without them: a resume then draws more of its "
                "noise again, and the same"
            ) from error

    def how(self, like: Mapping[str, Tensor]) -> str:
        """What numbers depend on beside the keys: how they are drawn, and for which parameters. An
        earlier row is of use to the same ones alone.
        """
        forms = sorted((name, tuple(g.shape)) for name, g in like.items())
        digest = hashlib.blake2b(repr(forms).encode(), digest_size=6).hexdigest()
        return f"{self._noise.source.how_drawn(like)}, parameters {digest}"

    def _rejoined(
        self, like: Mapping[str, Tensor], step: int, own: Mapping[str, Tensor]
    ) -> NoiseHistory:
        """The block's noise up to ``step``, made again. Where the same keys would give other
        numbers a new block begins: as private, and ``NoisySum.mixing_row`` tells the truth."""
        noise, digest = self._noise, self._noise.digest
        if digest is None:
            return noise.init(step)
        how = self.how(like)
        if self._drawn not in (None, how):
            self._block = step
            if self._writer is not None:
                self._writer.noise_block(step, digest)
            warnings.warn(
                f"the noise so far was drawn as {self._drawn}, and now it is drawn as {how}: "
                f"it is not correlated with the steps before {step}, as private, and a little less "
                "accurate; go on where the run began, and train the same parameters throughout, to "
                "avoid that",
                stacklevel=5,
            )
        if self._drawn != how and self._writer is not None:
            self._writer.noise_drawn(how)
        self._drawn = how
        kept = None
        if self._rows is not None:
            kept = load_rows(self._rows, noise, like, how, self._ring.sessions, self._block, step)
        return noise.of(places_of(own)).replay(
            locals_of(own), self._ring.key_of, self._block, step, kept
        )


def _held(own: Mapping[str, Tensor]) -> Held:
    """Shapes of what this process draws noise for, and where that lies in its parameters."""
    places = places_of(own)
    return {name: (tuple(t.shape), places.get(name)) for name, t in locals_of(own).items()}
