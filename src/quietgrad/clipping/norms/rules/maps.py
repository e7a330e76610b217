"""Rules of the maps that routines are made of (``capture/routines``), where one parameter serves
several inputs at once. Shape legend: b examples, t positions, k blocks of the parameter's rows.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from quietgrad.clipping.norms.factors import DenseFactors, DirectGradients, Given, SummedRows


def stacked_linear_rule(
    module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """y_k = x_k W_k^T + b_k for blocks W_k of one weight's rows; [b, t, k, features]."""
    out: dict[str, Given] = {}
    if "weight" in wanted:
        out["weight"] = DenseFactors(grad.transpose(1, 2), x.transpose(1, 2))
    if "bias" in wanted:
        out["bias"] = SummedRows(grad.flatten(2).unsqueeze(1))
    return out


def stacked_shift_rule(
    module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """y_k = x_k + b_k, the shift being the parameter; [b, t, k, features]."""
    return {"weight": SummedRows(grad.flatten(2).unsqueeze(1))}


def repeated_rule(
    module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """The weight itself, once for every example."""
    return {"weight": DirectGradients(grad.flatten(1))}
