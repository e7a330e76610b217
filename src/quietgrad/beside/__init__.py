"""Numbers that are released beside the noisy gradients of a step, of the same batch, with noise of
their own: a private estimate of the training loss, and the count that a clipping norm follows.
"""

from quietgrad.beside.adaptive import AdaptiveClipping
from quietgrad.beside.session import PrivateEstimate
from quietgrad.beside.training_loss import TrainingLoss

__all__ = ["AdaptiveClipping", "PrivateEstimate", "TrainingLoss"]
