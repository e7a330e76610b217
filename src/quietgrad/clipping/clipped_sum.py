"""The first type a gradient has on its way out: bounded, and still private."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quietgrad.beside.values import Observed, SideMethod, added, side_sums
from quietgrad.events import SensitivityClaim
from quietgrad.tensors import is_spread, local_of

ENTRIES = 64  # of each parameter that a stamp remembers


def _some_entries(gradient: Tensor) -> Tensor:
    """A copy of entries at even distances, as bits: not-a-number equals itself."""
    gradient = local_of(gradient)
    flat = (
        gradient.detach().reshape(-1) if gradient.is_contiguous() else gradient.detach().flatten()
    )
    return flat[:: max(1, flat.numel() // ENTRIES)].clone().view(torch.uint8)


def _same(now: Sequence[Tensor], then: Sequence[Tensor]) -> bool:
    """Whether lists of such copies are alike; each device is waited for once."""
    if [(t.shape, t.device) for t in now] != [(t.shape, t.device) for t in then]:
        return False
    return all(
        torch.equal(*(torch.cat([t for t in some if t.device == device]) for some in (now, then)))
        for device in {t.device for t in now}
    )


def _version(gradient: Tensor) -> int:
    return gradient._version + (local_of(gradient)._version if is_spread(gradient) else 0)


@dataclass(frozen=True)
class Stamp:
    """Where a clipped sum comes from. Secret and private: what of it does not fit is refused
    without saying how.

    Attributes:
        batch: the open batch that it is of, as an object that is nobody else's.
        run: name of the run that clipped it.
        release: which release of that run it is for.
        parts: one object for every call that clipped: a part that is added twice is in both.
        tensors: the sums that were stamped, with their versions and some of their entries: a sum
            that was changed afterwards, in place or by another in its place, has lost its bound.
            Versions do not count what is written through ``.data`` or numpy, so the entries are
            compared too: a sum that was scaled is seen, one entry among many that was written need
            not be.
    """

    batch: object
    run: str
    release: int
    parts: frozenset[object]
    tensors: tuple[tuple[str, Tensor, int, Tensor], ...] = field(repr=False, compare=False)

    @classmethod
    def on(
        cls,
        gradients: Mapping[str, Tensor],
        batch: object,
        run: str,
        release: int,
        parts: frozenset[object],
    ) -> Stamp:
        """A stamp on sums as they are now.

        Raises:
            ValueError: under torch.inference_mode, whose tensors keep no count of their changes.
        """
        if any(g.is_inference() for g in gradients.values()):
            raise ValueError(
                "clipped sums of torch.inference_mode() cannot be told from changed ones; clip "
                "outside of it (torch.no_grad() is fine)"
            )
        return cls(
            batch,
            run,
            release,
            parts,
            tuple((name, g, _version(g), _some_entries(g)) for name, g in gradients.items()),
        )

    def fits(self, gradients: Mapping[str, Tensor]) -> bool:
        """Whether ``gradients`` are the very tensors that were stamped, unchanged."""
        if len(gradients) != len(self.tensors) or not all(
            gradients.get(name) is tensor and _version(tensor) == version
            for name, tensor, version, _ in self.tensors
        ):
            return False
        now = [_some_entries(tensor) for _, tensor, _, _ in self.tensors]
        return _same(now, [entries for _, _, _, entries in self.tensors])

    def __repr__(self) -> str:
        return "Stamp(hidden)"


@dataclass(frozen=True)
class PrivateCounts:
    """Private counters of a batch. They are never released, logged or saved: a batch's size and
    clipping rate depend on the data.

    Attributes:
        examples: records of the sum.
        nonfinite: how many of them contribute zero.
        beside: name -> sum of what records add to a number beside the gradients, each at most 1 in
            absolute value; released with noise alone.
        least_times: what the least divisors of its records were multiplied by, which follows from
            the precision that the model runs in; none without records.
    """

    examples: int = 0
    nonfinite: Tensor | None = None
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    least_times: frozenset[float] = frozenset()

    @classmethod
    def of(
        cls,
        observed: Observed,
        beside: Iterable[SideMethod],
        least_times: float | None = None,
    ) -> PrivateCounts:
        """Of the records of a micro-batch."""
        finite = observed.shares.isfinite()
        known = frozenset([] if least_times is None or not len(finite) else [least_times])
        return cls(len(finite), (~finite).sum(), side_sums(beside, observed), known)

    def __add__(self, other: PrivateCounts) -> PrivateCounts:
        both = [c for c in (self.nonfinite, other.nonfinite) if c is not None]
        total = None if not both else both[0] if len(both) == 1 else both[0] + both[1]
        beside = added(self.beside, other.beside)
        known = self.least_times | other.least_times
        return PrivateCounts(self.examples + other.examples, total, beside, known)

    def __repr__(self) -> str:
        return "PrivateCounts(hidden)"


@dataclass(frozen=True)
class ClippedSum:
    """Sum over a batch of clipped per-example gradients, with the bound on one example's share.

    Attributes:
        gradients: parameter name -> sum of the clipped per-example gradients, in the parameter's
            shape. Private.
        claim: what one record can contribute to the sum.
        private: counters that must not be released.
        stamp: the run and the release that it is for; None for a sum that no run clipped, which
            none releases.
    """

    gradients: dict[str, Tensor] = field(repr=False)
    claim: SensitivityClaim
    private: PrivateCounts = field(default_factory=PrivateCounts, repr=False)
    stamp: Stamp | None = field(default=None, repr=False)

    @property
    def summed(self) -> dict[str, Tensor]:
        """All that is bounded here and released with noise. No parameter's name has two dots in a
        row.
        """
        return self.gradients | {f"..{name}": t for name, t in self.private.beside.items()}

    def __add__(self, other: ClippedSum) -> ClippedSum:
        """Micro-batches and ranks add up.

        Raises:
            ValueError: if the two make different claims, hold different parameters, are of
                different runs or releases, or share a part.
        """
        if self.claim != other.claim:
            raise ValueError(
                f"cannot add clipped sums with different claims: {self.claim} and {other.claim}"
            )
        if self.gradients.keys() != other.gradients.keys():
            raise ValueError(
                "cannot add clipped sums of different parameters; trainable parameters changed "
                "between micro-batches"
            )
        for name, g in self.gradients.items():
            one, two = ((x.shape, x.dtype) for x in (g, other.gradients[name]))
            if (
                one != two
            ):  # else addition would repeat the smaller, and a record would contribute as often
                raise ValueError(
                    f"cannot add clipped sums of different shapes or types: {name!r} has "
                    f"{tuple(one[0])} of {one[1]} and {tuple(two[0])} of {two[1]}; give gradients "
                    "in the parameter's shape, "
                    "and the number of examples where there are several"
                )
        gradients = {name: g + other.gradients[name] for name, g in self.gradients.items()}
        total = ClippedSum(gradients, self.claim, self.private + other.private)
        return replace(total, stamp=self._joined(other, total.summed))

    def _joined(self, other: ClippedSum, summed: Mapping[str, Tensor]) -> Stamp | None:
        one, two = self.stamp, other.stamp
        if one is None and two is None:
            return None
        if one is None or two is None or one.batch is not two.batch or one.release != two.release:
            raise ValueError(
                "cannot add clipped sums of different runs or releases, or one that no run "
                "clipped: clip every part of a batch with run.clip, after batches() gave it and "
                "before it is released (gradients made otherwise: run.contribution)"
            )
        if one.parts & two.parts:
            raise ValueError(
                "cannot add a clipped sum twice: a record would contribute more than the clipping "
                "norm; add the result of every run.clip once"
            )
        if not (one.fits(self.summed) and two.fits(other.summed)):
            raise ValueError(
                "a clipped sum was changed after it was clipped, so its bound is gone; leave it as "
                "run.clip returned it"
            )
        return Stamp.on(summed, one.batch, one.run, one.release, one.parts | two.parts)
