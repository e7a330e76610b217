"""Where a module's inputs and outputs carry their examples, for torch's own modules that need to be
told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Unit:
    """How a module without a rule is called.

    Attributes:
        whole: it uses the parameters of its children without calling them.
        state_dim: example dimension of all inputs and outputs but the first (final states are
            [layers, examples, hidden]); 0 where it is the first one everywhere.
        needs_batch_first: whether its own ``batch_first`` decides about the first.
        pair_mask: name and place of an argument that all examples share where it has two
            dimensions.
        batches: whether its forward pass has a batching rule.
    """

    whole: bool = False
    state_dim: int = 0
    needs_batch_first: bool = False
    pair_mask: tuple[str, int] | None = None
    batches: bool = True

    def examples_first(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether the first input has the example as its first dimension."""
        if not self.needs_batch_first:
            return True
        return bool(module.batch_first) and not (args and isinstance(args[0], PackedSequence))

    def dim_at(self, position: int) -> int:
        """Example dimension of an input or output at this place."""
        return self.state_dim if position else 0


PLAIN = Unit()
RECURRENT = Unit(whole=True, state_dim=1, needs_batch_first=True, batches=False)
ATTENTION = Unit(whole=True, needs_batch_first=True, pair_mask=("attn_mask", 5))


def unit_of(module: nn.Module) -> Unit:
    """By the module's class."""
    if isinstance(module, nn.RNNBase):
        return RECURRENT
    return ATTENTION if isinstance(module, nn.MultiheadAttention) else PLAIN


def first_dimension(leaf: Any) -> int:
    """Size of a tensor's first dimension; -1 for what has none."""
    return leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else -1
