"""Names of Opacus' layers. Quietgrad clips torch's own, so these are torch's own."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import TORCHS_LAYERS
from quietgrad.integrations.opacus.layers.dp_multihead_attention import DPMultiheadAttention
from quietgrad.integrations.opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN

__getattr__ = absent(
    __name__,
    dict.fromkeys(("SequenceBias", "RenameParamsMixin"), TORCHS_LAYERS),
)
__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]
