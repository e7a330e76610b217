"""Everything that can go wrong before training goes wrong here: configuration, data, model, plan, layers, run directory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.clipping.refusals import refuse_cross_example_layers
from quietgrad.clipping.verify import verify_clipping
from quietgrad.noise.mixing import MixingMatrix
from quietgrad.plan import PrivacyConfig, PrivacyPlan
from quietgrad.randomness import RandomKey
from quietgrad.sampling import CyclicPoissonSampler, PoissonSampler
from quietgrad.tensors import trainable_parameters
from quietgrad.training.config import TrainConfig
from quietgrad.training.feature_cache import FeatureCache, build_feature_cache
from quietgrad.training.generation import answer_loss
from quietgrad.training.image_data import LabelledImages
from quietgrad.training.metrics import MEAN_AUC, TOKEN_ACCURACY, Metric, dividing, metric_for
from quietgrad.training.models import LoadedModel
from quietgrad.training.noise_settings import check_spectrum, noise_settings
from quietgrad.training.prefix_cache import PrefixCache, build_prefix_cache
from quietgrad.training.public_head import draw_random_head, fit_public_head
from quietgrad.training.public_weights import check_public_weights
from quietgrad.training.records import Records, classification_loss, spread
from quietgrad.training.tasks import Task, load_model, load_task
from quietgrad.training.text_batches import TokenisedTexts, every_other

EVALUATION_BATCH = 256
# The fast path may differ from the slow oracle by rounding only.
LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start.

    Attributes:
        config: what was asked for.
        task: raw records.
        train, validation, test: records as the model reads them.
        model: the classifier, on the device.
        plan: the privacy plan; None for a run that is not private.
        sampler: the batches, the same with and without privacy.
        steps: T.
        device: where the model is.
    """

    config: TrainConfig
    task: Task
    train: Records
    validation: Records
    test: Records
    model: LoadedModel
    plan: PrivacyPlan | None
    sampler: PoissonSampler | CyclicPoissonSampler
    steps: int
    device: torch.device

    @property
    def expected_batch_size(self) -> float:
        if self.plan is not None:
            return self.plan.expected_batch_size
        return self.sampler.sample_rate * self.sampler.dataset_size

    @property
    def metric(self) -> Metric:
        """What the classifier is judged by."""
        return TOKEN_ACCURACY if self.config.task.kind == "generate" else metric_for(self.validation.labels)

    @property
    def evaluation_batch(self) -> int:
        """Records of a batch without gradients: of a language model no more than in training, for its outputs are as wide as its vocabulary."""
        return self.config.clipping.max_physical_batch_size if self.config.task.kind == "generate" else EVALUATION_BATCH

    def loss(self) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
        """(model, micro-batch) -> [examples], under autocast where the config asks for it; from inputs or cached states alike."""

        per_example = answer_loss if self.config.task.kind == "generate" else classification_loss

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            with precision_context(self.config, self.device):
                return per_example(model, batch)

        return loss

    def prefix_cache(self, records: Records | None = None) -> PrefixCache | FeatureCache | None:
        """States of the training records (or others) below the lowest trainable part, computed once.

        None where that does not apply or is switched off.
        """
        wanted = self.train if records is None else records
        if not self.config.training.cache_frozen_layers:
            return None
        if isinstance(wanted, LabelledImages):
            with precision_context(self.config, self.device):
                return build_feature_cache(self.model.classifier, wanted, self.device)
        if not isinstance(wanted, TokenisedTexts):
            return None
        assert isinstance(self.validation, TokenisedTexts)
        return build_prefix_cache(
            self.model.classifier,
            wanted,
            self.validation,
            self.device,
            lambda: precision_context(self.config, self.device),
        )


def precision_context(config: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 where ``training.precision`` asks for it."""
    if precision_of(config, device) == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def precision_of(config: TrainConfig, device: torch.device) -> str:
    """What "auto" means on this machine: bfloat16 where the processor multiplies in it."""
    if config.training.precision != "auto":
        return config.training.precision
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    if device.type == "cpu":
        return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() and _has_bfloat16_units() else "float32"
    return "float32"


def _has_bfloat16_units() -> bool:
    # Without them bfloat16 is emulated, and slower than float32.
    return _cpu_flag("avx512_bf16") or _cpu_flag("amx_bf16")


def _cpu_flag(flag: str) -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return any(flag in line.split() for line in file if line.startswith("flags"))
    except OSError:
        return False


def prepare(config: TrainConfig, mixing: MixingMatrix | None = None) -> Prepared:
    """Loads data and model, builds the plan, and checks all of it. ``mixing``: the matrix of a run that goes on.

    Raises:
        ValueError, TypeError: for anything the user can mend, naming key, value and remedy.
    """
    device = _device(config.training.device)
    task = load_task(config)
    check_public_weights(config.model.weights, task.record_ids, task.image_shape)
    # The plan is built before the model is loaded: its mistakes are cheaper to find.
    plan = build_plan(config, task.record_ids, mixing)
    if plan is None:
        reference = replace(
            _privacy_config(config, None, plain=True), target_epsilon=None, noise_multiplier=1.0, target_delta=None
        ).build(len(task.record_ids))
        sampler, steps = reference.sampler, reference.steps
    else:
        sampler, steps = plan.sampler, plan.steps
    key = RandomKey.from_entropy() if config.training.seed is None else RandomKey.from_seed(config.training.seed)
    torch.manual_seed(key.words("initialisation", 0)[0] & (2**63 - 1))
    model, (train, validation, test) = load_model(config, task, device)
    if config.model.public_head_steps:
        assert isinstance(validation, TokenisedTexts)
        fitted, validation = every_other(validation)  # accuracy on records that the head was fitted to would say little
        with precision_context(config, device):
            fit_public_head(model.classifier, fitted, device, config.model.public_head_steps)
    if config.model.random_head:
        draw_random_head(model.classifier)
    trainable_parameters(model.classifier)
    refuse_cross_example_layers(model.classifier)
    check_spectrum(config, model.classifier, task.record_ids, task.image_shape)
    prepared = Prepared(config, task, train, validation, test, model, plan, sampler, steps, device)
    if prepared.metric is MEAN_AUC:
        every = config.training.eval_records
        scheduled = validation.subset(spread(validation, every)) if every else validation
        for name, part in (("validation records (training.eval_records)", scheduled), ("test records", test)):
            if not dividing(part.labels).any():
                raise ValueError(f"no label divides the {len(part)} {name}, so they have no mean AUC; use more")
    return prepared


def build_plan(
    config: TrainConfig, record_ids: Sequence[bytes], mixing: MixingMatrix | None = None
) -> PrivacyPlan | None:
    """The privacy plan of a configuration; None where privacy is switched off. ``mixing``: a matrix found earlier, instead of solving again."""
    if not config.privacy.enabled:
        return None
    return _privacy_config(config, mixing).build(len(record_ids), record_ids)


def _privacy_config(config: TrainConfig, mixing: MixingMatrix | None, plain: bool = False) -> PrivacyConfig:
    return PrivacyConfig(
        **({} if plain else noise_settings(config, mixing)),
        target_epsilon=config.privacy.target_epsilon,
        target_delta=config.privacy.target_delta,
        noise_multiplier=config.privacy.noise_multiplier,
        max_grad_norm=config.privacy.max_grad_norm,
        expected_batch_size=config.training.expected_batch_size,
        steps=config.training.steps,
        epochs=config.training.epochs,
        estimator=config.clipping.estimator,
        sketch_dim=config.clipping.sketch_dim,
        max_physical_batch_size=config.clipping.max_physical_batch_size,
        seed=config.training.seed,
    )


def verify_on_public_records(prepared: Prepared) -> float:
    """Compares the clipping engine with the slow oracle on three validation records; returns the largest relative difference.

    Raises:
        RuntimeError: if they disagree by more than rounding.
    """
    records = np.arange(min(3, len(prepared.validation)))
    batch = prepared.validation.collate(records, prepared.device)
    with _head_off_zero(prepared.model.classifier):
        difference = verify_clipping(prepared.model.classifier, prepared.loss(), batch)
    limit = LARGEST_DIFFERENCE[precision_of(prepared.config, prepared.device)]
    if not difference < limit:
        raise RuntimeError(
            f"per-example clipping disagrees with plain autograd by {difference:.1e} (limit {limit:g}) on validation records: some layer of "
            f"{prepared.config.model.name!r} is captured wrongly; train other layers (model.tune, model.lora_targets) and report this"
        )
    return difference


@contextlib.contextmanager
def _head_off_zero(classifier: nn.Module) -> Any:
    """A head of zeros lets no gradient through: for the check it is filled with small numbers, and put back."""
    head = getattr(classifier, "head", None)
    if not isinstance(head, nn.Linear):
        yield
        return
    saved = head.weight.detach().clone()
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.1, 0.1, saved.numel()).reshape(saved.shape).sin())
    try:
        yield
    finally:
        with torch.no_grad():
            head.weight.copy_(saved)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"training.device={name!r} is not usable here: {str(error).splitlines()[0]}; use 'auto'"
        ) from error
    return device
