"""What each record of a batch adds to a number released beside the gradients: at most 1 in absolute
value, whatever the record holds.

A component says what of a record it looks at, and how large its noise is; the bound is kept here,
once, for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quietgrad.checks import require_at_most_one
from quietgrad.events import SideRelease

DEFAULT_SHARE = 0.01
LARGEST_SHARE = 0.4  # two components leave the gradients a fifth


@dataclass(frozen=True)
class Observed:
    """What is known of each record once its gradient is measured. Private.

    Attributes:
        losses: [b] mean loss over the record's views, or the user's records; None where gradients
            came without losses.
        shares: [b] the norm that each is divided by, over its clipping norm: the largest over
            groups of parameters. Infinite or not a number for one that contributes zero.
    """

    losses: Tensor | None
    shares: Tensor

    def __repr__(self) -> str:
        return "Observed(hidden)"


class SideMethod(Protocol):
    """One number beside the gradients: a frozen record, one a file."""

    @property
    def name(self) -> str:
        """Of the kind of release, in ledgers and events."""
        ...

    @property
    def share(self) -> float | None: ...
    @property
    def own_noise(self) -> float | None: ...
    @property
    def every(self) -> int: ...
    def of(self, observed: Observed) -> Tensor:
        """[b] what each record adds: a function of that record alone. ``side_sums`` clips it to
        -1 .. 1.
        """
        ...


class Named(Protocol):
    """What has a name to be told by: a method, or a release planned by one."""

    @property
    def name(self) -> str: ...


def beside_of(*methods: SideMethod | None) -> tuple[SideMethod, ...]:
    """Those that are there."""
    return tuple(method for method in methods if method is not None)


def require_alike(methods: Iterable[Named], changes: bool) -> None:
    """Numbers beside the gradients are for plans whose steps are all alike.

    Raises:
        ValueError: where settings change by step, or there are several phases.
    """
    names = [method.name for method in methods]
    if names and changes:
        raise ValueError(
            f"{' and '.join(names)} (training_loss, adaptive_clipping) with schedules, phases or "
            "an extension: shares of the budget and clipping norms that follow releases are for "
            "plans whose steps are all alike; take one of the two out"
        )


def side_sums(methods: Iterable[SideMethod], observed: Observed) -> dict[str, Tensor]:
    """Name -> sum over the records, a float64 scalar. Private.

    What is not a number counts as 1, an infinite value as the bound on its side.

    Raises:
        ValueError: where a component does not give one value for each gradient that was clipped,
            which would add up to more than 1.
    """
    sums = {}
    for method in methods:
        values = method.of(observed).detach().to(torch.float64)
        if values.shape != observed.shares.shape:
            raise ValueError(
                f"{method.name} has not one value for each clipped gradient; give one, such as the "
                "mean over what the gradient is of"
            )
        sums[method.name] = values.nan_to_num(nan=1.0, posinf=1.0, neginf=-1.0).clamp(-1, 1).sum()
    return sums


def added(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums of two parts of a batch."""
    return dict(one) | {
        n: one[n] + t.to(one[n].device) if n in one else t for n, t in other.items()
    }


def releases_beside(
    methods: Iterable[SideMethod], noise_multiplier: float
) -> tuple[SideRelease, ...]:
    """What is released with gradients of the given noise multiplier sigma.

    A share s of a step's budget means 1 / nu^2 = s / sigma_0^2, with 1 / sigma_0^2 = 1 / sigma^2 +
    the shares' 1 / nu^2: nu = sigma sqrt((1 - S) / s), S the sum of all shares.
    """
    methods = tuple(methods)
    given = [m for m in methods if m.own_noise is None]
    total = sum(m.share or DEFAULT_SHARE for m in given)
    found = []
    for method in methods:
        nu = method.own_noise
        if nu is None:
            nu = noise_multiplier * math.sqrt((1 - total) / (method.share or DEFAULT_SHARE))
        found.append(SideRelease(method.name, nu, method.every))
    return tuple(found)


def judge_noise(method: SideMethod) -> None:
    """At most one of share and own noise, and a share that leaves something.

    Raises:
        ValueError: naming the argument and the remedy.
    """
    require_at_most_one({"share": method.share, "own_noise": method.own_noise})
    if method.share is not None and method.share > LARGEST_SHARE:
        raise ValueError(
            f"share={method.share!r} of the budget is above {LARGEST_SHARE:g}, which leaves the "
            "gradients too little; 0.01 costs them half a per cent more noise"
        )
