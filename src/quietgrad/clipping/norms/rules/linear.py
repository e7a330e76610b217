"""Linear layers, and embeddings, which are linear in one-hot rows."""

from __future__ import annotations

from collections.abc import Collection

import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping.norms.factors import DenseFactors, Given, OneHotFactors, SummedRows


def linear_rule(
    module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """y = x W^T + b: M_i = G_i^T A_i."""
    return _affine(x, grad, wanted, transposed=False)


def transposed_linear_rule(
    module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """Hugging Face ``Conv1D``, y = x W + b: M_i = A_i^T G_i."""
    return _affine(x, grad, wanted, transposed=True)


def _affine(x: Tensor, grad: Tensor, wanted: Collection[str], transposed: bool) -> dict[str, Given]:
    b = x.shape[0]
    a_bgtd = x.reshape(b, 1, -1, x.shape[-1])
    g_bgtp = grad.reshape(b, 1, -1, grad.shape[-1])
    sizes = tuple(x.shape[1:-1]) if x.dim() > 3 else ()
    out: dict[str, Given] = {}
    if "weight" in wanted:
        a_bgtd, g_bgtp = _of_some_position(a_bgtd), _of_some_position(g_bgtp)
        factors = (a_bgtd, g_bgtp) if transposed else (g_bgtp, a_bgtd)
        out["weight"] = DenseFactors(*factors, sizes)
    if "bias" in wanted:
        out["bias"] = SummedRows(grad.unsqueeze(1), "right" if transposed else "left")
    return out


def _of_some_position(factor_bgtn: Tensor) -> Tensor:
    """Where texts are all empty, one position of zeros: sums over none have no place to begin."""
    return factor_bgtn if factor_bgtn.shape[2] else F.pad(factor_bgtn, (0, 0, 0, 1))


def embedding_rule(
    module: nn.Embedding | nn.EmbeddingBag, ids: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """y_t = W[id_t]: M_i = onehot(ids)^T G_i, positions that read ``padding_idx`` left out, as
    autograd does.
    """
    b = ids.shape[0]
    ids_bt = ids.reshape(b, -1)
    g_btd = grad.reshape(b, ids_bt.shape[1], grad.shape[-1])
    if not ids_bt.shape[1]:
        ids_bt, g_btd = F.pad(ids_bt, (0, 1)), F.pad(g_btd, (0, 0, 0, 1))
    if module.padding_idx is not None:
        g_btd = g_btd * (ids_bt != module.padding_idx).unsqueeze(-1)
    return {"weight": OneHotFactors(ids_bt, g_btd.unsqueeze(1), module.num_embeddings)}
