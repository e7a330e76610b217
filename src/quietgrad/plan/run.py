"""A plan in progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from quietgrad.beside.session import SideSession, TellsBeside
from quietgrad.clipping.bindings import Bindings
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.clipped_sum import ClippedSum, Stamp
from quietgrad.clipping.cut.company import CutCompany
from quietgrad.clipping.engines.summing import summing_of
from quietgrad.clipping.one_at_a_time import one_at_a_time
from quietgrad.clipping.sharded.company import Company
from quietgrad.clipping.soundness.guard import is_guarded
from quietgrad.clipping.soundness.processes import refuse_process_group
from quietgrad.distributed.clips import check_public, clip_parts
from quietgrad.distributed.sharded import clipping_on, public_records_of
from quietgrad.distributed.shares import Shares
from quietgrad.distributed.team import Alone, Team
from quietgrad.distributed.wrapping import model_inside
from quietgrad.events import NotPrivate
from quietgrad.ledger import LedgerWriter
from quietgrad.loading.batches import parts_of, records_of
from quietgrad.loading.draws import Draws
from quietgrad.loading.loader import PrivateLoader
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.plan.contribution import clip_given
from quietgrad.plan.open_batch import OpenBatch, end_of_loop, require_open
from quietgrad.plan.planned import Planned
from quietgrad.plan.progress import TellsProgress
from quietgrad.plan.releases import Releases
from quietgrad.plan.seeds import SeedUse
from quietgrad.plan.session.looks import LooksTogether
from quietgrad.plan.session.noise_session import NoiseSession
from quietgrad.plan.session.trained import Starts
from quietgrad.tensors import Batch


class PrivateRun(LooksTogether, TellsBeside, TellsProgress):
    """A plan in progress: which release comes next, and the streams. Never makes more releases than
    the plan has steps.

    It belongs to the process that started it, and cannot be copied.
    """

    def __init__(
        self,
        plan: Planned,
        session: NoiseSession,
        writer: LedgerWriter | None = None,
        released: int = 0,
        given_up: bool = False,
        seed_use: SeedUse | None = None,
        max_grad_norm: float | None = None,
        team: Team | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        self._team: Team = Alone() if team is None else team
        self._plan = plan
        self._session = session
        self._writer = writer
        self._name, self._released, self._given_up = name, released, given_up
        norm = max_grad_norm or plan.clipper.max_grad_norm
        size = plan.batch_size_at(plan.at(0))
        self._beside = SideSession(plan.beside, plan.event.beside, size, norm)
        self.bindings = Bindings(plan.clipper)  # an audit gives those that it examined
        self._seed_use = seed_use
        self._open: OpenBatch | None = None
        self._releases = Releases(plan, session, writer, self._team)
        self._shares = Shares(lambda step: plan.indices(session.key, step), *self._team.share)
        self._draws = Draws(self._shares)
        self._loader: PrivateLoader | None = None
        self._spent, self._closed = (0, 0.0), False  # releases, and their epsilon
        self._one_at_a_time = threading.Lock()
        self.starts = Starts(name, plan, writer, given_up)

    def batches(self, steps: int | None = None) -> Iterator[Any]:
        """Index batches for the releases that remain, or for so many of them: arrays, with users
        ``UserIndices``. Every one must be released, an empty one too: skipping would reveal it.
        What the loop draws from torch's, numpy's and Python's generators while a batch is open is
        from the run's secret; afterwards they go on as they were.

        Raises:
            RuntimeError: where a batch was not released, or in another process than the run's.
        """
        end = end_of_loop(self._released, self.plan.steps, steps, self._open is not None)
        self._team.loops("begins", self._released)
        while self._released < end:
            self._require_running()
            index = self._released
            indices = self._draws.take(index)
            clipper = self._beside.clipper(self.plan.clipper_at(index))
            self._open = OpenBatch(index, len(indices), self._shares.whole(index), clipper.claim)
            self.bindings.clipper = clipper
            with self._looping(end):
                yield indices
            if self._released > index + 1:
                raise RuntimeError(
                    "another loop over this run's batches has gone on; loop over them once"
                )
            if self._released == index:
                raise RuntimeError(
                    "the last batch was not released; call run.backward (or run.release) for "
                    "every batch, also an empty one: which batches are skipped would depend on "
                    "the data"
                )

    def loader(
        self,
        dataset: Any,
        *,
        steps: int | None = None,
        physical_batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        **options: Any,
    ) -> PrivateLoader:
        """A ``torch.utils.data.DataLoader`` of this run's batches: ``for batch in loader:
        run.backward(model, loss, batch)``. From now on no other records are clipped.

        Args:
            dataset: N records by number (a map-style ``Dataset``, a list, a ``datasets.Dataset``).
                What it returns for a number may depend on no other record.
            steps: releases a pass; None takes an epoch, 1 / q.
            physical_batch_size: most records a forward pass; None takes the plan's, or 64.
            collate_fn: makes a micro-batch of records, one row each; what a record's row means may
                not depend on the others (padding that the model masks is fine).
            options: of DataLoader: ``num_workers``, ``pin_memory``, ...; what is drawn in reading
                is from the run's secret, beside a ``generator`` or workers' seeds too.

        Raises:
            TypeError: for streams, loaders, and options that the plan decides.
            ValueError: for another number of records than planned, and where one follows from what
                was read before it.
        """
        self._shares.block, self._draws = physical_batch_size or 1, Draws(self._shares)
        with self._team.stopping_all():
            self._loader = PrivateLoader(
                self, self._draws, dataset, steps, physical_batch_size, collate_fn,
                options, self._read_seed, self._look_again,
            )  # fmt: skip
            self._look_first(dataset, self._loader.cut)
        return self._loader

    @one_at_a_time
    def clip(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> ClippedSum:
        """Clipped sum of the open batch, or of a part of it: parts add up with ``+``, each once. On
        several ranks, of this rank's share. Private. What model and loss draw from torch's, numpy's
        and Python's generators is from the run's secret, whatever these were seeded with.

        Args:
            model, per_example_loss: as for ``quietgrad.clipping.clipped_gradients``.
            batch: tensors [examples, ...]; or an iterator over micro-batches of the open batch (a
                generator), each clipped and added while one alone is held. With a loader, its
                batch, or one of its micro-batches, moved to the model's device.

        Raises:
            ValueError: for an iterator without a micro-batch, and what the clipper refuses.
            RuntimeError: in another process than the run's, or under a process group of several
                ranks; with a loader, for other records than those it gave last.
        """
        self._require_running()
        self._team.require()
        with (
            self._team.stopping_all(),
            clipping_on(self._team, model) as company,
            self._drawing(),
        ):
            return self._clipped(model_inside(model), per_example_loss, batch, company)

    def _clipped(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        batch: Batch,
        company: Company | CutCompany | None,
    ) -> ClippedSum:
        self._meets(model)
        bound = self.bindings.of(model, per_example_loss)
        size = self.plan.batch_size_at(self.plan.at(min(self._released, self.plan.steps - 1)))
        summing = summing_of(self.max_grad_norm, size, self._team.size > 1)
        if is_guarded(self._released):
            self._team.look_at(model, self._released, per_example_loss)
        key, release, device = self._session.key, self._released, next(model.parameters()).device
        parts: Iterator[Batch] = (records_of(p, self._loader, release) for p in parts_of(batch))
        if self._loader is not None:
            parts = self._loader.given(parts, bound, device)
        return clip_parts(bound, parts, key, release, summing, company, self._stamped)

    def check(
        self, model: nn.Module, per_example_loss: PerExampleLoss, public_batch: Batch
    ) -> None:
        """Examines model and loss on two or more public or made-up records, before any private one
        is read; the guard's later looks use them too. A sharded model: all ranks, the first's.

        Raises:
            ValueError: naming what cannot be clipped per example, with the remedy.
        """
        with self._team.stopping_all(), self._stepping.clipping():
            public_batch = public_records_of(self._team, model, public_batch, per_example_loss)
            bound = self.bindings.of(model_inside(model), per_example_loss)
            check_public(self._team, bound, model, public_batch)

    def contribution(
        self,
        gradients: Mapping[str, Tensor],
        examples: int | None = None,
        losses: Tensor | None = None,
        absent: bool = False,
    ) -> ClippedSum:
        """Per-example gradients that were made otherwise (a canary's, or by code of the user's
        own), clipped here and stamped as ``clip`` stamps: they add up with its sums.

        Each record is shortened, never lengthened, to norm C over all its parameters together; norm
        and factor are taken in float64. A record that is not finite counts and contributes zero.

        Args:
            gradients: name -> gradient of one record, in the parameter's shape; with ``examples``,
                [examples, *shape]. Private.
            examples: how many records, if not one. They have to be in the open batch, like those of
                any sum: the release counts them.
            losses, absent: [examples] for a training loss; True adds nothing beside the gradients.

        Raises:
            ValueError: for other numbers of records, or a law of sketched norms below exact ones.
            RuntimeError: in another process than the run's, or with a loader.
        """
        self._require_own_process()
        refuse_process_group()
        self._team.require()
        records_of(gradients, self._loader, self._released)
        claim, beside = self.bindings.clipper.claim, () if absent else self.plan.beside
        return self._stamped(clip_given(gradients, examples, claim, beside, losses))

    def _stamped(self, clipped: ClippedSum) -> ClippedSum:
        batch, part = None if self._open is None else self._open.name, frozenset([object()])
        stamp = Stamp.on(clipped.summed, batch, self._name, self._released, part)
        return replace(clipped, stamp=stamp)

    def release(self, clipped: ClippedSum) -> NoisySum:
        """Records the release, then draws the noise.

        Args:
            clipped: what ``clip`` returned for the open batch's parts, each added once, as it was.

        Raises:
            RuntimeError: if the plan's releases are used up, no batch is open, the sum is not of
                the open batch, or this is another process than the run's.
            ValueError: if the clipped sum claims another sensitivity than the plan accounts for.
        """
        with self._one_at_a_time:  # two threads would release one batch twice
            return self._release(clipped)

    def _release(self, clipped: ClippedSum) -> NoisySum:
        self._require_own_process()
        self._team.require()
        with self._team.stopping_all():
            opened = require_open(self._open, self._released, self.plan.steps, self._closed)
            opened.require_sum(clipped)
            facts = self._releases.facts(clipped, self._released, self._shares)
        held = self._team.agree("release", facts, clipped.private.examples)
        if self._team.size > 1:
            with self._team.stopping_all():
                opened.require_whole(held)
        self._tell_coarse(clipped)
        settings = self.plan.at(self._released)
        with self._team.releasing():
            self._releases.write_down(clipped, self._released, settings)
            self._released += 1
            if self._seed_use is not None:
                self._seed_use.releases = self._released
            noisy = self._releases.covered(clipped, settings)
            self._follow(noisy)
        return replace(noisy, expected_batch_size=self.plan.batch_size_at(settings))

    def _follow(self, noisy: NoisySum) -> None:
        self.starts.released(self._released)
        self._beside.take(self._released, noisy.beside)
        if self._writer is not None and self._beside.adapts:
            self._writer.clipping_norm(self.max_grad_norm)

    def keep_noise(self) -> None:
        """Keeps the rows that correlated noise goes on from in a secret file beside ``keys``, so
        that a resume draws again only what came after. Without ``keys``, with independent noise or
        memory="regenerate" there is nothing to keep. Cost: b - 1 copies of what is trained.
        """
        self._require_own_process()
        self._session.keep()

    def backward(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch
    ) -> NoisySum:
        """Stands where ``loss.backward()`` stood: one private step up to the optimiser's.

        Clips the open batch, writes the release down, adds the noise, post-processes by the plan's
        denoiser, and sets ``.grad`` of the trainable parameters to the mean, in place of what it
        held; a mean that no optimiser has stepped on yet is added to.

        Args:
            model, per_example_loss, batch: as for ``clip``; the whole batch, or all its parts.

        Returns:
            What was released, before the denoiser: what optimisers step on that denoise a moment of
            their own (``quietgrad.denoising.SpectralAdamW``), instead of ``.grad``.

        Raises:
            ValueError, RuntimeError: as ``clip`` and ``release``.
        """
        noisy = self.release(self.clip(model, per_example_loss, batch))
        self.plan.write_gradients(noisy, model_inside(model), self._team)
        return noisy

    def step(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> NoisySum:
        """The same as ``backward``."""
        return self.backward(model, per_example_loss, batch)

    def give_up_privacy(self, reason: str) -> NotPrivate:
        """Leave for ``quietgrad.research`` to look at this run's clipped gradients before their
        noise, for data that need no protection. Epsilon is infinite for good; the ledger says why.
        """
        self._require_own_process()
        refuse_process_group()
        permission, self._given_up = NotPrivate(reason, self._name), True
        self.starts.give_up()
        if self._writer is not None:
            self._writer.not_private(reason)
        return permission

    def close(self) -> None:
        """Closes the ledger; nothing can be released after it."""
        self._team.loops("closes", self._released)
        self._closed, self._loader = True, None  # workers that stay would hold on to files' locks
        if self._writer is not None:
            self._writer.close()
        self._over()

    def __enter__(self) -> PrivateRun:
        return self

    def __exit__(self, kind: object, error: BaseException | None = None, *_: object) -> None:
        if kind is not None and not self._closed and self._released < self.plan.steps:
            self._team.stop(error)
        self.close()
