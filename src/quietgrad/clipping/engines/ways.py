"""In which way a parameter's norms are taken beside sketches: a fact of the model, not of a batch.

A tied weight may be read as a table here and multiplied there, or be used by a module without a
rule, and whether it is may follow from the records of a batch (a branch that some of them need).
Norms of formed gradients, of rows and of products are not the same number: a sketch is an estimate.
One record would decide how all others are measured.
"""

from __future__ import annotations

from torch import nn

from quietgrad.clipping.capture.escapes import measured_otherwise
from quietgrad.clipping.capture.layout import Layout, Site
from quietgrad.clipping.capture.routines.opening import opens
from quietgrad.clipping.norms.factors import (
    Contribution,
    DenseFactors,
    DirectGradients,
    OneHotFactors,
)
from quietgrad.clipping.norms.rules.linear import embedding_rule

# Entries of a parameter's gradient up to which its norm waits for others'.
SMALL = 2**13


def small_gradients(uses: list[Contribution]) -> DirectGradients | None:
    """Of a parameter that has one use and few entries."""
    use = uses[0]
    if len(uses) > 1 or not isinstance(use, DirectGradients) or use.values_bn.shape[1] > SMALL:
        return None
    return use


def in_one_way(layout: Layout, name: str, uses: list[Contribution]) -> list[Contribution]:
    """The uses of a parameter, with one more that adds nothing where another of its modules, had it
    been called, would have changed how the norm is taken.

    Raises:
        NotCaptured: where one module uses it in two ways, at once or one after the other.
    """
    owners = layout.owners[name]
    if len(owners) > 1 and any(map(_is_formed, owners)):
        return [*uses, _no_gradient(layout, name, uses[0])]
    if any(isinstance(site.module, nn.MultiheadAttention) for site in owners):
        uses = [_of_one_block(use) for use in uses]
    blocks = {0 if isinstance(use, DirectGradients) else use.sizes.g for use in uses}
    if len(blocks) > 1 or layout.shared.ways.setdefault(name, min(blocks)) not in blocks:
        raise measured_otherwise(name)
    read = all(isinstance(use, OneHotFactors) for use in uses)
    return [*uses, _no_product(uses[0])] if read and not all(map(_is_read, owners)) else uses


def _of_one_block(use: Contribution) -> Contribution:
    """Attention to something else has a block of rows each for queries, keys and values, and
    attention to itself has one matrix.
    """
    if not isinstance(use, DenseFactors) or use.sizes.g == 1:
        return use
    s = use.sizes
    left = use.left_bgtp.new_zeros(s.b, 1, s.g * s.t, s.g * s.p)
    for j in range(s.g):
        left[:, 0, j * s.t : (j + 1) * s.t, j * s.p : (j + 1) * s.p] = use.left_bgtp[:, j]
    return DenseFactors(left, use.right_bgtd.reshape(s.b, 1, s.g * s.t, s.d))


def _is_formed(site: Site) -> bool:
    """Whether a module's gradients are formed, example by example."""
    return site.rule is None and not opens(site.module)


def _is_read(site: Site) -> bool:
    """Whether a module only reads rows of its parameter."""
    return site.rule is embedding_rule or isinstance(site.module, nn.EmbeddingBag)


def _no_gradient(layout: Layout, name: str, like: Contribution) -> DirectGradients:
    if isinstance(like, DirectGradients):
        return DirectGradients(like.values_bn.new_zeros(1, 1).expand(like.values_bn.shape))
    entries = layout.shape_of(name).numel()
    return DirectGradients(like.like.new_zeros(1, 1).expand(like.sizes.b, entries))


def _no_product(like: Contribution) -> DenseFactors:
    assert isinstance(like, OneHotFactors)
    s, zero = like.sizes, like.like.new_zeros(1, 1, 1, 1)
    return DenseFactors(zero.expand(s.b, 1, 1, s.p), zero.expand(s.b, 1, 1, s.d))
