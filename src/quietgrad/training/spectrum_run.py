"""``quietgrad spectrum``: public images to initial weights and the spectrum of their Hessian, with
where both came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.curvature import (
    CurvatureOperator,
    Spectrum,
    automatic_tail_index,
    positive_part,
    top_eigenvalues,
)
from quietgrad.curvature.pretraining import fit_to_labels, made_up_labels, simclr
from quietgrad.curvature.spectrum import record_hash
from quietgrad.tensors import trainable_parameters
from quietgrad.training.derived.resolve import with_what_trains
from quietgrad.training.files.run_dir import environment
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.tasks.images.data import LabelledImages
from quietgrad.training.tasks.images.feature_cache import HeadOnFeatures, embeddings
from quietgrad.training.tasks.images.models import (
    HUGGING_FACE,
    IMAGE_MODELS,
    RANDOM_FEATURES,
    ImageClassifier,
    is_image_model,
    load_image_classifier,
)
from quietgrad.training.tasks.images.public_weights import save_public_weights
from quietgrad.training.tasks.images.task import ImagesTask, load_unlabelled_images
from quietgrad.training.tasks.loaded import Tuning
from quietgrad.training.tasks.records import classification_loss
from quietgrad.training.tasks.registry import load_task

# images of one product's part; of a pretrained model performance.max_physical_batch_size, if that
# is less
BATCH = 250
HELD_OUT = "held-out"


@dataclass(frozen=True)
class SpectrumRun:
    """What was computed and where it lies. A body that is frozen from the start learns nothing from
    public images, and there are no weights to save.
    """

    spectrum: Spectrum
    spectrum_path: Path
    weights_path: Path | None


def make_spectrum(config: TrainConfig, report: Callable[[str], None]) -> SpectrumRun:
    """Pretrains on the public images, saves the weights, and computes the spectrum of the Hessian
    there.

    Args:
        config: model, data and [spectrum] tables; its private records are read only to refuse
            public ones among them.
        report: lines for people.

    Raises:
        ValueError: no public images, or some that are private, before any work.
    """
    config = with_what_trains(config)
    table = config.spectrum
    if not is_image_model(config.model.name):
        raise ValueError(
            f"model.name={config.model.name!r}: spectra are computed for image models here "
            f"({', '.join(IMAGE_MODELS)}, image:NAME of Hugging Face, torchvision:NAME); for "
            "others build one with quietgrad.curvature.CurvatureOperator and Spectrum.save, or use "
            "noise.method='banded'"
        )
    task = load_task(config)
    assert isinstance(task, ImagesTask)
    public = public_images(config, task)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shared = set(public.record_ids) & set(task.record_ids)
    if shared:
        raise ValueError(
            "public images are among the private training records; a spectrum of private data is "
            "not accounted for: take other images (spectrum.public)"
        )
    torch.manual_seed(table.public_seed)
    model = _model(config, public, len(task.label_names)).to(device)
    pixels = public.collate(np.arange(len(public)), device)["pixels"]
    body = nn.ModuleList(model.body())
    learns = any(p.requires_grad for p in body.parameters())
    if learns:
        simclr(
            model.embed,
            body,
            pixels,
            table.simclr_epochs,
            model.width,
            batch_size=_part(config),
            seed=table.public_seed,
            progress=lambda done, of: (
                report(f"SimCLR: epoch {done} of {of}") if done % 10 == 0 or done == of else None
            ),
        )
    model.eval()
    features, top = embeddings(model, public, device), HeadOnFeatures(model.head)
    labels: np.ndarray[Any, Any] = made_up_labels(
        nn.Identity(), features, len(task.label_names), table.made_up_labels, table.public_seed
    )
    if (
        task.splits.train.labels.ndim == 2
    ):  # several labels a record: the loss is another, and so is its Hessian
        labels = np.eye(len(task.label_names), dtype=np.float32)[labels]
    fit_to_labels(
        top,
        list(model.head.parameters()),
        features,
        labels,
        table.head_epochs,
        seed=table.public_seed,
    )
    spectrum_path = Path(table.output)
    spectrum_path.parent.mkdir(parents=True, exist_ok=True)
    weights_path = Path(table.weights_output) if learns else None
    started = {name: value.clone() for name, value in model.state_dict().items()}
    # Private training begins with a head of zeros: the made-up labels are not its labels.
    started |= {
        name: torch.zeros_like(value) for name, value in started.items() if name.startswith("head.")
    }
    if weights_path is not None:
        weights_path.parent.mkdir(parents=True, exist_ok=True)
        save_public_weights(started, weights_path, public.record_ids, public.pixels.shape[1:])
    convex = config.model.tune == "head"
    spectrum = _spectrum(
        config, top if convex else model, public, features if convex else pixels, labels, report
    )
    spectrum.save(spectrum_path)
    return SpectrumRun(spectrum, spectrum_path, weights_path)


def _part(config: TrainConfig) -> int:
    if config.model.name.startswith(HUGGING_FACE):
        return min(BATCH, config.physical_batch_size)
    return BATCH


def _model(config: TrainConfig, public: LabelledImages, labels: int) -> ImageClassifier:
    """The classifier to pretrain: what trains on public images is the whole of our own models, and
    of a pretrained one what will train privately too.
    """
    name = config.model.name
    own = Tuning("head" if name == RANDOM_FEATURES else "full")
    tuning = config.model.tuning if name.startswith(HUGGING_FACE) else own
    return load_image_classifier(name, tuple(public.pixels.shape[1:]), labels, tuning)


def public_images(config: TrainConfig, task: ImagesTask) -> LabelledImages:
    """The images that [spectrum] names: set aside from the training data, or another data set.

    Raises:
        ValueError: if there are none, or they do not have the private images' form.
    """
    table = config.spectrum
    if table.public == HELD_OUT:
        if task.public is None or not len(task.public):
            raise ValueError(
                "spectrum.public='held-out' needs images set aside: set data.public_fraction above "
                "0, or name a public data set"
            )
        images = task.public
    else:
        images = load_unlabelled_images(
            config, table.public, int(task.splits.train.pixels.shape[1])
        )
    train = task.splits.train
    if table.public_images and table.public_images < len(images):
        order = np.argsort(np.array(images.record_ids, dtype="S32"), kind="stable")
        images = images.subset(np.sort(order[: table.public_images]))
    if images.pixels.shape[1:] != train.pixels.shape[1:]:
        raise ValueError(
            f"spectrum.public={table.public!r} has images of the form "
            f"{tuple(images.pixels.shape[1:])}, the private ones {tuple(train.pixels.shape[1:])}; "
            "set data.image_size"
        )
    return images


def _spectrum(
    config: TrainConfig,
    model: nn.Module,
    public: LabelledImages,
    inputs: Tensor,
    labels: np.ndarray[Any, Any],
    report: Callable[[str], None],
) -> Spectrum:
    table = config.spectrum
    count = min(table.hessian_records, len(public))
    targets = torch.from_numpy(labels).to(inputs.device)
    batches = [
        {"inputs": x, "labels": y}
        for x, y in zip(
            inputs[:count].split(_part(config)), targets[:count].split(_part(config)), strict=True
        )
    ]
    # First derivatives of all images at once: too much where a large body takes part.
    keep = config.model.tune == "head" or not config.model.name.startswith(HUGGING_FACE)
    operator = CurvatureOperator(model, classification_loss, batches, keep_graphs=keep)
    size = int(operator.shape[0])
    report(f"Hessian of {size} parameters on {count} public images: mass of the positive part")
    positive = positive_part(operator, table.probes, table.lanczos_steps, seed=table.public_seed)
    wanted = min(table.top, size - 1)
    report(f"the {wanted} largest eigenvalues")
    top = top_eigenvalues(operator, wanted, seed=table.public_seed)
    tail = automatic_tail_index(top.values, positive.mass, size, table.tail_value)
    bound = Clipper(1.0, "exact").bind(model, classification_loss)
    norms = torch.cat([bound.norms(batch) for batch in batches]).cpu().numpy()
    facts = {
        # How clipping shortens gradients is part of how their sum answers to a change of the
        # weights.
        "gradient_norm_quantiles": [float(q) for q in np.quantile(norms, np.linspace(0, 1, 101))],
        "matrix": "hessian",
        "loss": f"{'binary cross entropies' if labels.ndim == 2 else 'cross entropy'} of labels "
        f"made up as {table.made_up_labels}",
        "public": table.public,
        "public_images": len(public),
        "image_shape": list(public.pixels.shape[1:]),
        "hessian_images": count,
        "products": top.products + table.probes * table.lanczos_steps,
        "parameters": size,
        "positive_count": positive.count,
        "positive_count_error": positive.count_error,
        "positive_mass": positive.mass,
        "positive_mass_error": positive.mass_error,
        "negative_mass": positive.negative_mass,
        "count_threshold": positive.threshold,
        "environment": environment(),
    }
    hashes = tuple(sorted({record_hash(i) for i in public.record_ids}))
    shapes = {name: tuple(p.shape) for name, p in trainable_parameters(model).items()}
    return Spectrum(top.values, top.residuals, tail, shapes, hashes, table.tail_value, facts)
