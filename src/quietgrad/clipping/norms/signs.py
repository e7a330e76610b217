"""The spread of gradients that come formed, from one more gradient with random signs.

Where nothing is known of what a gradient M = sum_o J_o^T g_o over the entries o of a module's
output is a sum of, its terms' norms are not known either. But with independent signs s_o

    E |sum_o s_o J_o^T g_o|^2 = sum_o |J_o^T g_o|^2,

whatever cancels in M. The sum of the terms' norms is above the root of that, by the root of their
number at most; rounding, which is independent from term to term, is of the size of the root. Signs
are a product of one vector a dimension of the output: pairwise independent, which is all that the
expectation needs, and the same for a record whether it is padded or not. They are drawn afresh for
every release, in secret: no record can be made to cancel under them too. A parameter of few entries
may come out small by chance (of one entry below a 64th in one of 80 cases).
Cost: as another backward pass of the module.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.sending import sent

# The spread in units of that root.
OF_SQUARES = 4.0


@dataclass(frozen=True)
class Signs:
    """Of the outputs of one module, for one release.

    Attributes:
        projections: of the release.
        module: the module's name.
    """

    projections: Projections
    module: str

    def times(self, gradient: Tensor, output: int, example_dim: int = 0) -> Tensor:
        """The gradient at an output with its signs, the same for every example.

        Args:
            gradient: at the module's output. Private.
            output: place among the module's outputs.
            example_dim: dimension of the examples.
        """
        for dim in range(gradient.dim()):
            if dim != example_dim:
                stream = f"signs\x00{self.module}\x00{output}\x00{dim}"
                signs = self.projections.signs(stream, gradient.shape[dim])
                drawn = sent(signs, gradient.device).to(gradient.dtype)
                shape = [-1 if d == dim else 1 for d in range(gradient.dim())]
                gradient = gradient * drawn.view(shape)
        return gradient
