"""How clipping norms are split over parameters, and how a norm becomes a clip factor.

Whole-model clipping bounds one norm by C. Per-layer and grouped clipping bound each group's norm by
its own threshold C_j with sum_j C_j^2 = C^2, so the whole contribution is at most C as well: the
same claim, the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor

Scaling = Literal["clip", "automatic"]
SCALINGS: tuple[Scaling, ...] = ("clip", "automatic")

# gamma of automatic clipping; Bu et al. 2023, "Automatic clipping", section 3, use 0.01.
STABILITY = 0.01

Groups = tuple[tuple[str, float], ...]
Split = Literal["whole", "layer"] | Groups


@dataclass(frozen=True)
class Thresholds:
    """Each parameter's group and each group's threshold.

    Attributes:
        group_of: parameter name -> group.
        values: threshold of each group; their root sum of squares is C.
    """

    group_of: Mapping[str, int]
    values: tuple[float, ...]


def thresholds(names: Sequence[str], max_grad_norm: float, groups: Split) -> Thresholds:
    """Splits C over groups of parameters.

    Args:
        names: trainable parameters.
        max_grad_norm: C.
        groups: "whole", "layer" (one group per module that owns parameters, equal thresholds), or
            (pattern, share) pairs: a parameter belongs to the first pattern that matches its name,
            thresholds are proportional to shares.

    Raises:
        ValueError: for a parameter without a group or a pattern without a parameter.
    """
    if groups == "whole":
        return Thresholds(dict.fromkeys(names, 0), (max_grad_norm,))
    if groups == "layer":
        owners: dict[str, int] = {}
        group_of = {name: owners.setdefault(name.rpartition(".")[0], len(owners)) for name in names}
        return Thresholds(group_of, (max_grad_norm / math.sqrt(len(owners)),) * len(owners))
    group_of = {}
    for name in names:
        index = next(
            (i for i, (pattern, _) in enumerate(groups) if fnmatchcase(name, pattern)), None
        )
        if index is None:
            raise ValueError(
                f"groups={dict(groups)!r} has no pattern for parameter {name!r}; add a last "
                "pattern '*' that takes what is left"
            )
        group_of[name] = index
    unused = [pattern for i, (pattern, _) in enumerate(groups) if i not in group_of.values()]
    if unused:
        raise ValueError(
            f"groups has pattern {unused[0]!r}, which matches no trainable parameter; remove or "
            "correct it"
        )
    size = math.sqrt(sum(share**2 for _, share in groups))
    return Thresholds(group_of, tuple(max_grad_norm * share / size for _, share in groups))


def require_groups(groups: str | Mapping[str, float] | Iterable[tuple[str, float]]) -> str | Groups:
    """Checks the argument before any work starts.

    Raises:
        ValueError: naming the argument and the remedy.
    """
    if isinstance(groups, str):
        if groups not in ("whole", "layer"):
            raise ValueError(
                f"groups={groups!r} is unknown; use 'whole', 'layer', or a mapping from parameter "
                "name patterns to shares of the norm"
            )
        return groups
    pairs = tuple(
        (str(p), float(s)) for p, s in (groups.items() if isinstance(groups, Mapping) else groups)
    )
    if not pairs or any(not (math.isfinite(share) and share > 0) for _, share in pairs):
        raise ValueError(f"groups={dict(pairs)!r} must map at least one pattern to a share above 0")
    return pairs


def clip_factors(norms: Tensor, limits: Tensor, scaling: Scaling) -> Tensor:
    """[groups, b] factors that bound each example's share of each group by the group's threshold.

    Args:
        norms: [groups, b] upper bounds of norms, not squared; infinite or not a number where an
            example must be dropped.
        limits: [groups] thresholds.
        scaling: "clip", min(1, C / n), or "automatic", C / (n + 0.01): every contribution is scaled
            to nearly C (Bu et al. 2023).

    Returns:
        Factors; exactly 0 in every group for an example with a norm that is not finite in any.
    """
    limits = limits.unsqueeze(1)
    factors = (
        limits / (norms + STABILITY) if scaling == "automatic" else (limits / norms).clamp(max=1.0)
    )
    return factors.masked_fill(~norms.isfinite().all(dim=0), 0.0)
