"""Names of Opacus' layers. Quietgrad clips torch's own, so these are torch's own."""

from torch.nn import GRU as DPGRU
from torch.nn import LSTM as DPLSTM
from torch.nn import RNN as DPRNN
from torch.nn import MultiheadAttention as DPMultiheadAttention

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]
