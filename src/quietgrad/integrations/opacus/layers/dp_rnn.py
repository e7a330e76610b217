"""Recurrent layers under Opacus' names."""

from torch.nn import GRU as DPGRU
from torch.nn import LSTM as DPLSTM
from torch.nn import RNN as DPRNN
from torch.nn import GRUCell as DPGRUCell
from torch.nn import LSTMCell as DPLSTMCell
from torch.nn import RNNCell as DPRNNCell

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import TORCHS_LAYERS

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPGRUCell", "DPLSTMCell", "DPRNNCell"]
__getattr__ = absent(
    __name__,
    dict.fromkeys(("DPRNNBase", "DPRNNCellBase", "RNNLinear", "apply_permutation"), TORCHS_LAYERS),
)
