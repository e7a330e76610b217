"""One frozen configuration to sampler, clipper, noise and privacy event, cross-checked: the only room that knows all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quietgrad.accounting import epsilon_report, noise_multiplier
from quietgrad.accounting.spending import EpsilonReport
from quietgrad.checks import require_at_least, require_delta, require_int, require_positive, require_rate, require_word
from quietgrad.clipping.backward import PerExampleLoss
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.engine import Clipper
from quietgrad.clipping.engines import ENGINES
from quietgrad.clipping.planner import DEFAULT_SKETCH_DIM, ESTIMATORS
from quietgrad.clipping.thresholds import SCALINGS
from quietgrad.denoising.denoiser import SpectralDenoiser
from quietgrad.facts import PoissonGaussian, RandomizedClipping
from quietgrad.keyring import KeyRing, read_ring, write_ring
from quietgrad.ledger import LedgerContents, LedgerWriter, read_ledger
from quietgrad.noise.bands import BandChoice, choose_bands, default_candidates
from quietgrad.noise.correlated import BandedNoise, NoiseHistory
from quietgrad.noise.gaussian import GaussianNoise
from quietgrad.noise.mixing import MixingMatrix, mixing_matrix
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.noise.workloads import PrefixSums, Workload, as_workload
from quietgrad.randomness import RandomKey
from quietgrad.sampling.cyclic import CyclicPoissonSampler, deal, index_ids
from quietgrad.sampling.poisson import PoissonSampler
from quietgrad.tensors import Batch

DELTA_EXPONENT = 1.1
NEIGHBOURING = "add-remove"


@dataclass(frozen=True)
class PrivacyConfig:
    """What to guarantee and how to train; ``build`` turns it into a plan.

    Attributes:
        target_epsilon: calibrate the noise to this epsilon; give this or ``noise_multiplier``.
        noise_multiplier: sigma, relative to the clipping norm, on the sum of clipped gradients.
        target_delta: default 1 / N^1.1.
        max_grad_norm: C.
        expected_batch_size: B; give this or ``sample_rate``.
        sample_rate: q = B / N.
        steps: T; give this or ``epochs``.
        epochs: T = round(epochs / q), at least 1.
        estimator, sketch_dim: see ``quietgrad.clipping.clipped_gradients``.
        max_physical_batch_size: most examples per forward pass (None: the planner's choice); no effect on privacy.
        memory_budget: bytes that a step may take over parameters and data; no effect on privacy.
        clipping_engine, clipping_groups, clipping_scaling, clipping_layers: see ``quietgrad.clipping.Clipper``.
        bands: b of noise correlated across steps; 1 is independent noise, "auto" chooses b from public facts (``quietgrad.noise.choose_bands``).
        workload: what the correlation minimises: ``PrefixSums``, ``Curvature``, a [steps, steps] matrix, or a function from steps to one (None: prefix sums).
        mixing: a matrix already found, instead of ``bands`` and ``workload``.
        mixing_family: see ``quietgrad.noise.mixing_matrix``.
        noise_memory: "rows" or "regenerate", see ``quietgrad.noise.BandedNoise``.
        denoiser: what ``PrivateRun.step`` does to a released sum before it is written to ``.grad``; no effect on privacy.
        seed: makes sampling, projections and noise reproducible; the guarantee then holds only if it stays secret.
    """

    target_epsilon: float | None = None
    target_delta: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0
    expected_batch_size: int | None = None
    sample_rate: float | None = None
    steps: int | None = None
    epochs: float | None = None
    estimator: str = "auto"
    sketch_dim: int = DEFAULT_SKETCH_DIM
    max_physical_batch_size: int | None = None
    memory_budget: float | None = None
    clipping_engine: str = "auto"
    clipping_groups: str | Mapping[str, float] = "whole"
    clipping_scaling: str = "clip"
    clipping_layers: Mapping[str, str] | None = None
    bands: int | str = 1
    workload: Workload | NDArray[np.float64] | Callable[[int], Workload] | None = None
    mixing: MixingMatrix | None = None
    mixing_family: str = "auto"
    noise_memory: str = "rows"
    denoiser: SpectralDenoiser | None = None
    seed: int | None = None

    def build(self, dataset_size: int, record_ids: Sequence[bytes] | None = None) -> PrivacyPlan:
        """Checks everything, calibrates the noise, and returns the plan.

        Args:
            dataset_size: N, records in the training data, treated as public.
            record_ids: with more than one band, what identifies each record, a function of that record alone (its content): it decides the record's part. None takes its
                index; the guarantee then is for leaving a record's place empty ("zero-out"), and the order of the records must stay the same in every session.

        Raises:
            ValueError, TypeError: naming the argument, its value and the remedy.
        """
        require_int("dataset_size", dataset_size)
        require_at_least("dataset_size", dataset_size, 1, "there is nothing to train on")
        if self.seed is not None:
            RandomKey.from_seed(self.seed)
        if self.denoiser is not None and self.denoiser.target != "gradient":
            raise ValueError(
                f"denoiser.target={self.denoiser.target!r} acts inside the optimiser: pass that denoiser to quietgrad.denoising.SpectralAdamW or SpectralSGD, and "
                "leave PrivacyConfig.denoiser unset"
            )
        q = self._rate(dataset_size)
        steps = self._steps(q)
        delta = self._delta(dataset_size)
        clipper = Clipper(
            self.max_grad_norm,
            require_word("estimator", self.estimator, ESTIMATORS),
            self.sketch_dim,
            max_micro_batch_size=self.max_physical_batch_size,
            engine=require_word("clipping_engine", self.clipping_engine, ENGINES),
            groups=self.clipping_groups,
            scaling=require_word("clipping_scaling", self.clipping_scaling, SCALINGS),
            layers=self.clipping_layers or {},
            memory_budget=self.memory_budget,
        )
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give exactly one of target_epsilon and noise_multiplier")
        if self.noise_multiplier is not None:
            require_positive("noise_multiplier", self.noise_multiplier)
        else:
            require_positive("target_epsilon", self.target_epsilon)

        def sigma_of(bands: int) -> float:
            if self.noise_multiplier is not None:
                return float(self.noise_multiplier)
            assert self.target_epsilon is not None
            return noise_multiplier(
                self.target_epsilon, delta, sample_rate=q, steps=steps, clipping=clipper.claim.clipping, bands=bands
            )

        choice, mixing = self._mixing(steps, q, sigma_of)
        bands = 1 if mixing is None else mixing.bands
        sigma = sigma_of(bands)
        event = PoissonGaussian(sigma, q, steps, clipper.claim.clipping, bands)
        if event.bands * q > 1:
            warnings.warn(
                f"bands={bands} times the sampling rate {q:.4g} exceeds 1: every batch is a whole part of {dataset_size / bands:.0f} records, fewer than the "
                f"{q * dataset_size:.0f} asked for; use at most {int(1 / q)} bands",
                UserWarning,
                stacklevel=2,
            )
        sampler: PoissonSampler | CyclicPoissonSampler = PoissonSampler(dataset_size, q)
        noise: GaussianNoise | BandedNoise = GaussianNoise(sigma)
        if mixing is not None and bands > 1:
            ids = index_ids(dataset_size) if record_ids is None else record_ids
            if len(ids) != dataset_size:
                raise ValueError(
                    f"record_ids has {len(ids)} entries for dataset_size={dataset_size}; give one a record"
                )
            sampler = CyclicPoissonSampler(dataset_size, q, bands, deal(ids, bands))
            noise = BandedNoise(sigma, mixing.banded, self.noise_memory)
        return PrivacyPlan(
            config=self,
            dataset_size=dataset_size,
            expected_batch_size=event.participation_rate / bands * dataset_size,
            sampler=sampler,
            clipper=clipper,
            noise=noise,
            event=event,
            delta=delta,
            report=epsilon_report(event, delta),
            mixing=mixing,
            band_choice=choice,
            record_identity="index" if bands > 1 and record_ids is None else "content",
        )

    def _mixing(
        self, steps: int, q: float, sigma_of: Callable[[int], float]
    ) -> tuple[BandChoice | None, MixingMatrix | None]:
        """The mixing matrix and how its bands were chosen; (None, None) for independent noise."""
        if self.mixing is not None:
            if self.bands != 1 or self.workload is not None:
                raise ValueError(
                    "mixing is given, and so are bands or workload; give the matrix, or what it is made from"
                )
            if self.mixing.steps != steps:
                raise ValueError(
                    f"mixing has {self.mixing.steps} rows for {steps} steps; build it for the steps of the run"
                )
            return None, self.mixing
        if self.bands == 1:
            if self.workload is not None:
                raise ValueError(
                    "workload is given, but bands=1 is independent noise; set bands to a number above 1, or to 'auto'"
                )
            return None, None
        given = PrefixSums if self.workload is None else self.workload
        load = as_workload(given(steps) if callable(given) else given)
        if load.steps != steps:
            raise ValueError(
                f"workload is for {load.steps} steps, the run has {steps}; build it for the steps of the run"
            )
        if self.bands == "auto":
            if self.target_epsilon is None:
                raise ValueError(
                    "bands='auto' weighs correlation against the noise that target_epsilon needs; give target_epsilon instead of noise_multiplier, or a number of bands"
                )
            found = choose_bands(load, sigma_of, default_candidates(steps, q), self.mixing_family)
            return found, found.chosen.mixing
        if isinstance(self.bands, str):
            raise ValueError(f"bands={self.bands!r} must be a whole number or 'auto'")
        return None, mixing_matrix(load, self.bands, self.mixing_family)

    def _rate(self, dataset_size: int) -> float:
        if (self.expected_batch_size is None) == (self.sample_rate is None):
            raise ValueError("give exactly one of expected_batch_size and sample_rate")
        if self.sample_rate is not None:
            require_rate("sample_rate", self.sample_rate)
            return float(self.sample_rate)
        assert self.expected_batch_size is not None
        require_positive("expected_batch_size", self.expected_batch_size)
        if self.expected_batch_size > dataset_size:
            raise ValueError(
                f"expected_batch_size={self.expected_batch_size} exceeds the number of records, {dataset_size}; use at most {dataset_size}"
            )
        return self.expected_batch_size / dataset_size

    def _steps(self, q: float) -> int:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.steps is not None:
            require_int("steps", self.steps)
            require_at_least("steps", self.steps, 1, "train for at least one step")
            return self.steps
        assert self.epochs is not None
        require_positive("epochs", self.epochs)
        return max(1, round(self.epochs / q))

    def _delta(self, dataset_size: int) -> float:
        if self.target_delta is None:
            return min(dataset_size**-DELTA_EXPONENT, 0.5)
        require_delta("target_delta", self.target_delta)
        if self.target_delta >= 1 / dataset_size and dataset_size > 1:
            warnings.warn(
                f"target_delta={self.target_delta} is not below 1/{dataset_size}, one over the number of records: a mechanism that publishes one "
                f"record outright could meet it; use at most {dataset_size**-DELTA_EXPONENT:.2g}",
                UserWarning,
                stacklevel=3,
            )
        return float(self.target_delta)


@dataclass(frozen=True)
class PrivacyPlan:
    """Sampler, clipper, noise and event that belong together. Frozen; ``start`` runs it.

    Attributes:
        config: what it was built from.
        dataset_size: N.
        expected_batch_size: B = q N, the divisor of every released sum; N / b where b q exceeds 1.
        sampler, clipper, noise: the mechanism that runs.
        event: the mechanism that is accounted for, all steps.
        delta: target delta.
        report: epsilon at that delta, with the discretisation used.
        mixing: the mixing matrix of correlated noise, and what is known of it.
        band_choice: how the number of bands was chosen, where it was.
        record_identity: with more than one band, what decides a record's part: "content" (``record_ids`` were given) or "index".
    """

    config: PrivacyConfig
    dataset_size: int
    expected_batch_size: float
    sampler: PoissonSampler | CyclicPoissonSampler
    clipper: Clipper
    noise: GaussianNoise | BandedNoise
    event: PoissonGaussian
    delta: float
    report: EpsilonReport
    mixing: MixingMatrix | None = None
    band_choice: BandChoice | None = None
    record_identity: str = "content"

    def __post_init__(self) -> None:
        # The mechanism that runs is the one accounted for; these can only fail if the plan was put together by hand.
        if self.sampler.sample_rate != self.event.sample_rate or self.sampler.dataset_size != self.dataset_size:
            raise ValueError(
                "the sampler's rate or data set size is not the accounted one; build plans with PrivacyConfig.build"
            )
        if self.noise.noise_multiplier != self.event.noise_multiplier:
            raise ValueError(
                "the noise multiplier that would run is not the accounted one; build plans with PrivacyConfig.build"
            )
        running = self.noise.bands if isinstance(self.noise, BandedNoise) else 1
        dealt = self.sampler.bands if isinstance(self.sampler, CyclicPoissonSampler) else 1
        if not self.event.bands == running == dealt:
            raise ValueError(
                f"bands={self.event.bands} is accounted for, but the noise that would run has {running} and the sampler {dealt}; "
                "build plans with PrivacyConfig.build"
            )
        if isinstance(self.noise, BandedNoise) and self.noise.mixing.steps < self.event.steps:
            raise ValueError(
                f"the mixing matrix has {self.noise.mixing.steps} rows for {self.event.steps} steps; build plans with PrivacyConfig.build"
            )
        if self.clipper.claim.clipping != self.event.clipping:
            raise ValueError(
                f"the clipper claims {self.clipper.claim.clipping}, but {self.event.clipping} was accounted for; "
                "build plans with PrivacyConfig.build"
            )
        if self.report.event != self.event or self.report.delta != self.delta:
            raise ValueError(
                "the epsilon was computed for another event or delta; build plans with PrivacyConfig.build"
            )

    @property
    def noise_multiplier(self) -> float:
        return self.noise.noise_multiplier

    @property
    def steps(self) -> int:
        return self.event.steps

    @property
    def epsilon(self) -> float:
        """Epsilon of the whole plan at ``delta``."""
        return self.report.epsilon

    def start(self, ledger: str | Path | None = None, keys: str | Path | None = None) -> PrivateRun:
        """Begins to run the plan, or goes on with it if the ledger already holds releases of the same mechanism.

        Correlated noise goes on exactly where its earlier draws can be made again: with the same seed, or ``keys``, and the same matrix. Otherwise it begins anew (a new
        block): as private, a little less well correlated.

        Args:
            ledger: file to record every release in before it is made; None keeps count in memory only.
            keys: file for the secret roots of correlated noise without a seed, one a session; remove it when the run has ended, and never publish it.

        Raises:
            ValueError: if the ledger was written by a different mechanism, or is in use.
        """
        key = RandomKey.from_entropy() if self.config.seed is None else RandomKey.from_seed(self.config.seed)
        if ledger is None:
            return PrivateRun(self, KeyRing(((0, key),)), None, 0)
        writer = LedgerWriter(ledger)  # locked before it is read: nobody else can add releases in between
        try:
            contents = read_ledger(ledger)
            if contents.header:
                self._require_same_mechanism(contents.header)
            else:
                writer.mechanism(
                    self.event,
                    planned_steps=self.steps,
                    delta=self.delta,
                    dataset_size=self.dataset_size,
                    max_grad_norm=self.config.max_grad_norm,
                    **self._sampling_facts(),
                )
            ring = self._ring(key, contents, None if keys is None else Path(keys))
        except ValueError:
            writer.close()
            raise
        return PrivateRun(self, ring, writer, contents.releases, self._block(writer, contents, ring))

    @property
    def neighbouring(self) -> str:
        """The relation that epsilon is about. Parts dealt by index move when a record is taken out, so its place has to stay, empty."""
        return "zero-out" if self.record_identity == "index" else NEIGHBOURING

    def _sampling_facts(self) -> dict[str, object]:
        # Not the sizes of the parts: they say more of a record than that it is there.
        cyclic = isinstance(self.sampler, CyclicPoissonSampler)
        facts: dict[str, object] = {
            "sampler": "cyclic-poisson" if cyclic else "poisson",
            "neighbouring": self.neighbouring,
        }
        return facts | ({"record_identity": self.record_identity} if cyclic else {})

    def _ring(self, key: RandomKey, contents: LedgerContents, keys: Path | None) -> KeyRing:
        """Roots by step. A seed draws all steps; else this session draws with a fresh root, and older ones make earlier noise again."""
        if self.config.seed is not None:
            return KeyRing(((0, key),))
        # Roots that a ledger without releases knows nothing of are another run's.
        earlier = KeyRing(()) if keys is None or not contents.releases else read_ring(keys)
        ring = earlier.with_session(contents.releases, key)
        if keys is not None and isinstance(self.noise, BandedNoise):
            write_ring(ring, keys)
        return ring

    def _block(self, writer: LedgerWriter, contents: LedgerContents, ring: KeyRing) -> int:
        """First step of the block that the next release belongs to; a new one is recorded."""
        if not isinstance(self.noise, BandedNoise):
            return 0
        digest, last = self.noise.digest, contents.noise_block
        if last is not None and last[1] == digest and ring.covers(last[0]):
            return last[0]
        writer.noise_block(contents.releases, digest)
        return contents.releases

    def _require_same_mechanism(self, header: dict[str, object]) -> None:

        planned = {
            "event": replace(self.event, steps=self.event.bands).to_json(),
            "dataset_size": self.dataset_size,
            "max_grad_norm": self.config.max_grad_norm,
            "planned_steps": self.steps,
            "delta": self.delta,
            **self._sampling_facts(),
        }
        for name, value in planned.items():
            if header.get(name) != value:
                raise ValueError(
                    f"resume with a changed privacy setting: {name} was {header.get(name)!r} and is now {value!r}; "
                    "resume with the settings of the first start, or begin a new run directory (its epsilon adds to this one's)"
                )


class PrivateRun:
    """A plan in progress: which release comes next, and the streams. Never makes more releases than the plan has steps."""

    def __init__(
        self, plan: PrivacyPlan, ring: KeyRing, writer: LedgerWriter | None, released: int, block: int = 0
    ) -> None:
        self.plan = plan
        self._ring = ring
        self._key = ring.sessions[-1][1]  # of this session: all that is drawn from now on
        self._writer = writer
        self._released = released
        self._block = block
        self._history: NoiseHistory | None = None
        self._open_batch: int | None = None
        self._projection_stream: tuple[int, torch.Generator] | None = None

    @property
    def released(self) -> int:
        """Noisy sums released so far, also those of an earlier session with the same ledger."""
        return self._released

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """Index batches for the releases that remain. Every one must be released, an empty one too: skipping would reveal it.

        Raises:
            RuntimeError: if the previous batch was not released.
        """
        while self._released < self.plan.steps:
            index = self._released
            self._open_batch = index
            yield self.plan.sampler.indices(self._key, index)
            if self._released == index:
                raise RuntimeError(
                    "the last batch was not released; call step() (or release()) for every batch, also an empty one: "
                    "which batches are skipped would depend on the data"
                )

    def clip(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> ClippedSum:
        """Clipped sum of the next release's batch, or of a part of it: parts add up with ``+``. Private."""
        return self.plan.clipper.clip(model, per_example_loss, batch, self._projections())

    def _projections(self) -> torch.Generator | None:
        """One stream a release: the clip calls of its micro-batches go on drawing from it, so no projection is used twice."""
        if not isinstance(self.plan.clipper.claim.clipping, RandomizedClipping):
            return None
        if self._projection_stream is None or self._projection_stream[0] != self._released:
            generator = torch.Generator()
            generator.manual_seed(self._key.words("projection", self._released)[0] & (2**63 - 1))
            self._projection_stream = (self._released, generator)
        return self._projection_stream[1]

    def release(self, clipped: ClippedSum) -> NoisySum:
        """Records the release, then draws the noise.

        Raises:
            RuntimeError: if the plan's releases are used up.
            ValueError: if the clipped sum claims another sensitivity than the plan accounts for.
        """
        if self._released >= self.plan.steps:
            raise RuntimeError(f"all {self.plan.steps} releases of the plan are made; build a plan with more steps")
        if self._open_batch is not None and self._open_batch != self._released:
            raise RuntimeError(
                "this batch is released already; every release needs a batch of its own from batches(), or the sampling rate "
                "accounted for is not the one that ran"
            )
        if self._open_batch is None and isinstance(self.plan.sampler, CyclicPoissonSampler):
            raise RuntimeError(
                "with correlated noise every release needs the batch that batches() gave for it: a record may take part in every b-th step only"
            )
        if clipped.claim != self.plan.clipper.claim:
            raise ValueError(
                f"the clipped sum claims {clipped.claim}, but the plan accounts for {self.plan.clipper.claim}"
            )
        if self._writer is not None:
            self._writer.release(self._released)
        step = self._released
        self._released += 1
        noise = self.plan.noise
        if isinstance(noise, GaussianNoise):
            return noise.release(clipped, self._key, step)
        if self._history is None or self._history.step != step:  # the first release here, or the one before failed
            self._history = noise.replay(clipped.gradients, self._ring.key_of, self._block, step)
        noisy, self._history = noise.release(clipped, self._key, step, self._history, self._ring.key_of)
        return noisy

    def step(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> NoisySum:
        """Clips, records and releases one batch, and writes the mean gradients to ``model`` for the optimiser, denoised if the plan has a denoiser.

        Returns:
            What was released, before denoising.
        """
        noisy = self.release(self.clip(model, per_example_loss, batch))
        denoiser = self.plan.config.denoiser
        written = noisy if denoiser is None else denoiser.denoise(noisy, model)
        written.write_gradients(model, self.plan.expected_batch_size)
        return noisy

    def epsilon(self) -> float:
        """Privacy spent so far at the plan's delta; 0 before the first release."""
        if self._released == 0:
            return 0.0

        return epsilon_report(self.plan.event.after(self._released), self.plan.delta).epsilon

    def close(self) -> None:
        """Closes the ledger."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> PrivateRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
