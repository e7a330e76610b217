"""Products of a vector with the Hessian, or the Gauss-Newton matrix, of a mean loss over public
data, without forming either.

Symbols: p parameters, n examples, theta parameters as one vector, L(theta) = (1/n) sum_i loss_i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quietgrad.checks import require_word
from quietgrad.tensors import batch_size_of, trainable_parameters

Batch = Any
PerExampleLoss = Callable[[nn.Module, Batch], Tensor]
OutputLoss = Callable[[Tensor, Batch], Tensor]
KINDS = ("hessian", "gauss-newton")


class CurvatureOperator(LinearOperator):
    """H v for H the Hessian or the Gauss-Newton matrix of the mean loss, as a scipy linear operator
    [p, p] on float64 vectors.

    Deterministic: put the model in evaluation mode, or without dropout. Attention must be the eager
    implementation: fused kernels have no second derivative.
    """

    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        batches: Sequence[Batch],
        kind: str = "hessian",
        parameters: Sequence[str] | None = None,
        output_loss: OutputLoss | None = None,
        keep_graphs: bool = False,
    ) -> None:
        """
        Args:
            model: with the parameters at which to differentiate.
            per_example_loss: (model, batch) -> [examples]; with kind="gauss-newton" the model's
                outputs [examples, ...] instead.
            batches: the public data, cut as memory allows.
            kind: "hessian" or "gauss-newton".
            parameters: names of those to differentiate by (None: all trainable ones; LoRA factors
                are such).
            output_loss: for "gauss-newton", (outputs, batch) -> [examples], convex in the outputs.
            keep_graphs: keep every batch's first derivative: products then cost half, memory grows
                with all examples instead of one batch ("hessian" only).

        Cost of a product: about two training steps over the data ("hessian"), three
        ("gauss-newton").

        Raises:
            ValueError: unknown kind or parameter, no batches, a loss that is not one value per
                example.
        """
        self.kind = require_word("kind", kind, KINDS)
        found = trainable_parameters(model)
        names = list(found) if parameters is None else list(parameters)
        unknown = [name for name in names if name not in found]
        if unknown:
            raise ValueError(f"parameters: {unknown[0]!r} is no trainable parameter of the model")
        if not batches:
            raise ValueError("batches is empty: there is no data to take the curvature of")
        if kind == "gauss-newton" and output_loss is None:
            raise ValueError(
                "kind='gauss-newton' needs output_loss, the part of the loss that follows the "
                "model's outputs"
            )
        self.model, self.loss, self.batches, self.output_loss = (
            model,
            per_example_loss,
            batches,
            output_loss,
        )
        self.names = names
        self.parameters = [found[name] for name in names]
        self.examples = sum(batch_size_of(batch) for batch in batches)
        self._graphs: list[list[Tensor]] | None = [] if keep_graphs and kind == "hessian" else None
        size = sum(p.numel() for p in self.parameters)
        super().__init__(np.dtype(np.float64), (size, size))

    def _matvec(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        direction = self._split(np.asarray(vector).reshape(-1))
        total = [torch.zeros_like(p) for p in self.parameters]
        product = self._hessian if self.kind == "hessian" else self._gauss_newton
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            for index, batch in enumerate(self.batches):
                for sum_, part in zip(total, product(index, batch, direction), strict=True):
                    if part is not None:
                        sum_ += part.detach()
        flat = torch.cat([t.reshape(-1) for t in total]).double().cpu().numpy()
        return flat / self.examples

    def _hessian(
        self, index: int, batch: Batch, direction: list[Tensor]
    ) -> Sequence[Tensor | None]:
        if self._graphs is None:
            slopes = self._slopes(batch)
        else:
            if len(self._graphs) <= index:
                self._graphs.append(self._slopes(batch))
            slopes = self._graphs[index]
        return torch.autograd.grad(
            slopes,
            self.parameters,
            grad_outputs=direction,
            allow_unused=True,
            retain_graph=self._graphs is not None,
        )

    def _slopes(self, batch: Batch) -> list[Tensor]:
        losses = self._checked(self.loss(self.model, batch), batch)
        slopes = torch.autograd.grad(
            losses.sum(), self.parameters, create_graph=True, allow_unused=True
        )
        # A parameter without influence, or with a linear one, has no second derivative: a zero that
        # depends on it keeps autograd content.
        return [
            p * 0.0 if slope is None else slope + p * 0.0
            for slope, p in zip(slopes, self.parameters, strict=True)
        ]

    def _gauss_newton(
        self, index: int, batch: Batch, direction: list[Tensor]
    ) -> Sequence[Tensor | None]:
        assert self.output_loss is not None
        outputs = self.loss(self.model, batch)
        probe = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(
            outputs, self.parameters, probe, create_graph=True, allow_unused=True
        )
        used = [(g, v) for g, v in zip(pulled, direction, strict=True) if g is not None]
        # J v: the derivative of J^T probe . v by the probe.
        (moved,) = torch.autograd.grad([g for g, _ in used], probe, [v for _, v in used])
        free = outputs.detach().requires_grad_(True)
        losses = self._checked(self.output_loss(free, batch), batch)
        (slope,) = torch.autograd.grad(losses.sum(), free, create_graph=True)
        (curved,) = torch.autograd.grad(slope, free, moved)
        return torch.autograd.grad(outputs, self.parameters, curved, allow_unused=True)

    def _checked(self, losses: Tensor, batch: Batch) -> Tensor:
        if losses.shape != (batch_size_of(batch),):
            raise ValueError(
                f"the loss returned the shape {tuple(losses.shape)} for {batch_size_of(batch)} "
                "examples; return one value per example, shape [examples]"
            )
        return losses

    def _split(self, vector: NDArray[np.float64]) -> list[Tensor]:
        parts, start = [], 0
        for p in self.parameters:
            stop = start + p.numel()
            parts.append(
                torch.from_numpy(vector[start:stop].copy()).to(p.device, p.dtype).reshape(p.shape)
            )
            start = stop
        return parts
