"""A ``PrivacyConfig`` among the hyperparameters of a checkpoint."""

from __future__ import annotations

import torch

from quietgrad.beside.adaptive import AdaptiveClipping
from quietgrad.beside.training_loss import TrainingLoss
from quietgrad.clipping.settings import Clipping, Performance
from quietgrad.denoising import (
    ConstantAmplification,
    HardThreshold,
    OnMomentum,
    PersistentAmplification,
    PublishedShrinkage,
    SpikesWithBulk,
)
from quietgrad.noise.methods import BandedNoise, IndependentNoise
from quietgrad.plan import PrivacyConfig
from quietgrad.sampling.users import Users
from quietgrad.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    Listed,
    Phase,
    Schedules,
    Stepwise,
)

# What a configuration is made of: numbers and names, which nothing is run for when they are read.
PARTS = (
    PrivacyConfig,
    Schedules,
    Phase,
    Constant,
    Cosine,
    Exponential,
    Linear,
    Listed,
    Stepwise,
    Clipping,
    Performance,
    IndependentNoise,
    BandedNoise,
    Users,
    TrainingLoss,
    AdaptiveClipping,
    OnMomentum,
    ConstantAmplification,
    HardThreshold,
    SpikesWithBulk,
    PersistentAmplification,
    PublishedShrinkage,
)


def let_configurations_load() -> None:
    """Lets ``torch.load`` read configurations with ``weights_only``, its default: a module that
    saves its ``privacy`` among its hyperparameters could be gone on with, or loaded, by nothing
    else.
    """
    torch.serialization.add_safe_globals(list(PARTS))
