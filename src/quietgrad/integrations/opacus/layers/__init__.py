"""Names of Opacus' layers. Quietgrad clips torch's own, so these are torch's own."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.layers.dp_multihead_attention import DPMultiheadAttention
from quietgrad.integrations.opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN

__getattr__ = absent(
    __name__,
    dict.fromkeys(
        ("SequenceBias", "RenameParamsMixin"), "torch's own layers are trained, as they are"
    ),
)
__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]
