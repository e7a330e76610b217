"""Measurements that need the clipped gradient before its noise: for understanding denoisers on data
that are not private.

What is returned here depends on private values that no noise covers. Every function asks for a
``NotPrivate``, which ``PrivateRun.give_up_privacy`` gives: from then on the run's epsilon is
infinite and its ledger says why. Every record says that it is not private, and nothing else in the
library calls these functions. Source: Gradient Matrix Denoising, section 3.1 (Improvement(t)) and
its per-layer form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.denoising.formulas import bulk_edge
from quietgrad.denoising.matrices import matrix_shapes
from quietgrad.denoising.rules.protocols import GradientRule
from quietgrad.events import NotPrivate
from quietgrad.noise.noisy_sum import NoisySum


@dataclass(frozen=True)
class LayerAlignment:
    """One matrix of one release.

    Attributes:
        name, rows, columns: which parameter.
        before, after: cosine with the clipped gradient, noisy and denoised.
        ratio: largest noisy singular value in edges of the bulk.
        private: always "this record is not private".
    """

    name: str
    rows: int
    columns: int
    before: float
    after: float
    ratio: float
    private: str = "this record is not private"


@dataclass(frozen=True)
class Alignment:
    """One release.

    Attributes:
        before, after: cosine of the whole gradient with the clipped one, noisy and denoised;
            ``after - before`` is Improvement(t).
        layers: the matrices.
        private: always "this record is not private".
    """

    before: float
    after: float
    layers: tuple[LayerAlignment, ...]
    private: str = "this record is not private"

    @property
    def improvement(self) -> float:
        return self.after - self.before


def alignment(
    clipped: ClippedSum,
    noisy: NoisySum,
    rule: GradientRule,
    model: nn.Module | None = None,
    *,
    embeddings: bool = False,
    not_private: NotPrivate,
) -> Alignment:
    """How much closer to the clipped gradient denoising brings a release, as a whole and layer by
    layer. Private: see the module.

    Args:
        clipped, noisy: the sum before and after its noise.
        rule: such as ``PublishedShrinkage()``.
        model: tells embeddings and experts from other weights.
        embeddings: whether embedding tables are among the layers.
        not_private: from ``run.give_up_privacy(reason)``; ``NotPrivate(reason)`` for values that
            are of no run.

    Raises:
        TypeError: without it.
        ValueError: for a run's sum, and a permission that is not from that run.
    """
    _require_switch(not_private, clipped)
    denoised = rule.denoise(noisy, model).gradients
    layers = []
    for name, shape in matrix_shapes(noisy.gradients, model, embeddings).items():
        if shape.count > 1:
            continue
        clean, loud = clipped.gradients[name], noisy.gradients[name]
        sides = (shape.rows, shape.columns)
        top = float(torch.linalg.matrix_norm(loud.reshape(sides).float(), ord=2))
        before, after = _cosine(loud, clean), _cosine(denoised[name], clean)
        layers.append(
            LayerAlignment(name, *sides, before, after, top / bulk_edge(sides, noisy.noise_std))
        )
    return Alignment(
        _whole_cosine(noisy.gradients, clipped.gradients),
        _whole_cosine(denoised, clipped.gradients),
        tuple(layers),
    )


def singular_values(
    clipped: ClippedSum, noisy: NoisySum, name: str, *, not_private: NotPrivate
) -> tuple[Tensor, Tensor, float]:
    """(before, after the noise, edge of the bulk) for one parameter, seen as rows x the rest.
    Private: see the module.
    """
    _require_switch(not_private, clipped)
    clean, loud = (x.gradients[name].float().flatten(1) for x in (clipped, noisy))
    return (
        torch.linalg.svdvals(clean),
        torch.linalg.svdvals(loud),
        bulk_edge(clean.shape, noisy.noise_std),
    )


def _require_switch(not_private: NotPrivate, clipped: ClippedSum) -> None:
    if not isinstance(not_private, NotPrivate):
        raise TypeError(
            f"not_private={not_private!r}: this looks at clipped gradients before their noise, so "
            "what it returns is private and a run that uses it has no epsilon; on data that need "
            "no "
            "protection pass not_private=run.give_up_privacy(reason)"
        )
    if clipped.stamp is not None and clipped.stamp.run != not_private.run:
        raise ValueError(
            f"not_private={not_private!r} is not from the run that clipped this sum, whose ledger "
            "would go on telling an epsilon; pass not_private=run.give_up_privacy(reason) of that "
            "run"
        )


def _cosine(a: Tensor, b: Tensor) -> float:
    product = torch.linalg.vector_norm(a.float()) * torch.linalg.vector_norm(b.float())
    return float((a.float() * b.float()).sum() / product) if float(product) else 0.0


def _whole_cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    inner = sum(float((a[n].float() * b[n].float()).sum()) for n in b)
    sizes = [sum(float(x[n].float().square().sum()) for n in b) ** 0.5 for x in (a, b)]
    return inner / (sizes[0] * sizes[1]) if all(sizes) else 0.0
