"""From a data set to the batches of a run, through torch's DataLoader."""

from quietgrad.loading.bags import Bags
from quietgrad.loading.batches import LoadedBatch, MicroBatch
from quietgrad.loading.loader import PrivateLoader

__all__ = ["Bags", "LoadedBatch", "MicroBatch", "PrivateLoader"]
