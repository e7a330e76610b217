"""[training_loss] and [adaptive_clipping] of a configuration file: what is released beside the
gradients; nothing unless asked for.
"""

from __future__ import annotations

from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.training.settings.reading import Table

# "none" is None: NoneType() gives it.
TRAINING_LOSS = Table({"none": type(None), "clipped-mean": TrainingLoss}, "method")
ADAPTIVE_CLIPPING = Table({"none": type(None), "quantile": AdaptiveClipping}, "method")
