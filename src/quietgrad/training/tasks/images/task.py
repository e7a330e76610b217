"""Classes of images."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quietgrad.training.exporting.exportable import BATCH, Exportable
from quietgrad.training.files.provenance import FILE as DESCRIPTION_FILE
from quietgrad.training.files.provenance import Record
from quietgrad.training.precision import precision_context
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.sources.hub import TORCHVISION
from quietgrad.training.tasks.images.data import (
    LabelledImages,
    is_image_source,
    load_images,
    split_images,
)
from quietgrad.training.tasks.images.exported import export_images
from quietgrad.training.tasks.images.feature_cache import FeatureCache, build_feature_cache
from quietgrad.training.tasks.images.folder import (
    ENDINGS,
    FolderLayout,
    is_image_folder,
    load_image_folder,
    load_pictures,
    load_unlabelled_folder,
)
from quietgrad.training.tasks.images.models import (
    IMAGE_MODELS,
    ImageClassifier,
    is_image_model,
    load_image_classifier,
)
from quietgrad.training.tasks.images.vision import check_vision
from quietgrad.training.tasks.loaded import WEIGHTS_FILE, LoadedModel, save_weights
from quietgrad.training.tasks.predictions import SEPARATOR, Predictions, classified
from quietgrad.training.tasks.records import Records, Told, outputs, unheard
from quietgrad.training.tasks.splits import Splits
from quietgrad.training.tasks.task import EVALUATION_BATCH, OF_ANSWERS, OF_TEXTS, Parts, Task, ready
from quietgrad.training.tasks.text.models import without_bars


class ImagesTask(Task):
    """Labelled images, and a body with a head.

    Attributes:
        public: images set aside as public and unlabelled, for spectra.
    """

    what = "a classifier of images"
    unread = (*OF_ANSWERS, *OF_TEXTS, "data.test_fraction", "model.max_length")

    def __init__(
        self, splits: Splits[LabelledImages], public: LabelledImages | None = None
    ) -> None:
        self.splits = splits
        self.public = public

    @classmethod
    def reads(cls, config: TrainConfig) -> bool:
        """Where data or model are of images."""
        return _holds_images(config.data.source) or is_image_model(config.model.name)

    @classmethod
    def load(cls, config: TrainConfig) -> ImagesTask:
        """See ``Task.load``."""
        images, wanted = _holds_images(config.data.source), is_image_model(config.model.name)
        if wanted and not images and Path(config.data.source).is_dir():
            raise ValueError(
                f"data.source={config.data.source!r} is a folder without train/ and test/ "
                "(train/CLASS/*.png, test/CLASS/*.png), or train.csv and test.csv; name the folder "
                "that holds them"
            )
        if images != wanted:
            raise ValueError(
                f"data.source={config.data.source!r} holds {'images' if images else 'texts'}, and "
                f"model.name={config.model.name!r} reads {'images' if wanted else 'texts'}; "
                f"image models are {', '.join(IMAGE_MODELS)}, image:NAME of Hugging Face and "
                "torchvision:NAME"
            )
        if config.model.name.startswith(TORCHVISION):
            check_vision(config.model.name)
        if config.task.kind == "generate" or config.data.test_source:
            raise ValueError(
                "task.kind='generate' and data.test_source are for texts; images come with test "
                "records"
            )
        if config.data.user:
            raise ValueError(
                f"data.user={config.data.user!r} is for texts, answers and tables; images are read "
                "without a column of owners: build a plan in Python (record_owner, docs/users.md)"
            )
        if config.data.skip_bad:
            raise ValueError(
                "data.skip_bad=True is for texts and tables; an image that cannot be read, or has "
                "no label, stays a record and contributes nothing: leave it out"
            )
        if config.data.label_separator and not is_image_folder(config.data.source):
            raise ValueError(
                f"data.label_separator={config.data.label_separator!r} is for a folder with "
                f"train.csv and test.csv; data.source={config.data.source!r} has one label a record"
            )
        if config.data.labels and not is_image_folder(config.data.source):
            raise ValueError(
                f"data.labels={config.data.labels!r} is for a folder of images; "
                f"data.source={config.data.source!r} brings its own list: leave it out"
            )
        train, test = load_any_images(config, config.data.source)
        return cls(
            *split_images(train, test, config.data.validation_fraction, config.data.public_fraction)
        )

    @property
    def form(self) -> tuple[int, ...]:
        """[channels, height, width] of the records."""
        return tuple(self.splits.train.pixels.shape[1:])

    def read(self, config: TrainConfig, device: torch.device) -> tuple[LoadedModel, Parts]:
        """See ``Task.read``."""
        table = config.model
        classifier = load_image_classifier(
            table.name, self.form, len(self.label_names), table.tuning, table.weights
        )
        model = LoadedModel(classifier, None, table.name, table.tuning.how, "mean", table.weights)
        parts = (self.splits.train, self.splits.validation, self.splits.test)
        return ready(config, model, device), parts

    def save(self, model: LoadedModel, folder: Path, trained_on: Record) -> None:
        """Weights in the form that ``model.weights`` reads."""
        several = self.splits.test.labels.ndim == 2
        save_weights(
            model,
            self.label_names,
            folder,
            trained_on,
            form=list(self.form),
            several_labels=several,
        )
        with without_bars():
            export_images(model, self.label_names, self.form, several, folder, trained_on)

    @classmethod
    def predict(
        cls, config: TrainConfig, folder: Path, file: Path, device: torch.device
    ) -> Predictions:
        """See ``Task.predict``: every image in a folder, or one image; one that cannot be read
        stays without a label.
        """
        files = picture_files(file)
        facts = _described(folder)
        images, readable = load_pictures(files, facts["form"])
        labels = facts["labels"]
        model = _load_saved(config, folder, facts)
        logits = outputs(model.to(device), images, EVALUATION_BATCH, device)
        several = (config.data.label_separator or SEPARATOR) if facts["several_labels"] else None
        below = file if file.is_dir() else file.parent
        given = {"file": [path.relative_to(below).as_posix() for path in files]}
        return classified(given, labels, logits, several, readable)

    @classmethod
    def exportable(cls, config: TrainConfig, folder: Path) -> Exportable:
        """See ``Task.exportable``; adapters are merged."""
        facts = _described(folder)
        model = _load_saved(config, folder, facts)
        if config.model.tune == "lora":
            holder = cast(Any, model)
            holder.backbone = holder.backbone.merge_and_unload()
        size = 2 * math.prod(facts["form"])
        pixels = torch.linspace(-1, 1, size).reshape(2, *facts["form"])
        told = {"pixels": "between -1 and 1", "several_labels": facts["several_labels"]}
        return Exportable(
            model.eval(), {"pixels": pixels}, {"pixels": (BATCH,)}, facts["labels"], facts=told
        )

    def cache(
        self,
        config: TrainConfig,
        classifier: nn.Module,
        records: Records,
        validation: Records,
        device: torch.device,
        told: Told = unheard,
    ) -> FeatureCache | None:
        """The frozen body, run once an image."""
        assert isinstance(records, LabelledImages)
        with precision_context(config, device):
            return build_feature_cache(classifier, records, device, told)


def _described(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / DESCRIPTION_FILE).read_text())
    if "form" not in facts:
        raise ValueError(
            f"RUN_DIR={str(folder.parent)!r} does not say what its images look like: it was made "
            "by an earlier version; train again"
        )
    return facts


def _load_saved(config: TrainConfig, folder: Path, facts: dict[str, Any]) -> ImageClassifier:
    table, count = config.model, len(facts["labels"])
    weights = str(folder / WEIGHTS_FILE)
    return load_image_classifier(table.name, facts["form"], count, table.tuning, weights)


def picture_files(place: Path) -> list[Path]:
    """Every image file in a folder and below it, by name; or the one that is named.

    Raises:
        ValueError: if there is none.
    """
    if place.is_file() and place.suffix.lower() in ENDINGS:
        return [place]
    if not place.is_dir():
        raise ValueError(
            f"FILE={str(place)!r} is no folder of images and no image ({', '.join(ENDINGS)})"
        )
    files = sorted(p for p in place.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
    if not files:
        raise ValueError(f"FILE={str(place)!r} holds no images ({', '.join(ENDINGS)})")
    return files


def load_unlabelled_images(config: TrainConfig, source: str, channels: int) -> LabelledImages:
    """Training images of a source of either kind, at the configuration's size and with so many
    channels; their labels are not looked at.
    """
    if not is_image_folder(source):
        return load_images(source, config.data.image_size)[0].with_channels(channels)
    return load_unlabelled_folder(source, _layout(config), config.data.image_size, channels)


def load_any_images(config: TrainConfig, source: str) -> tuple[LabelledImages, LabelledImages]:
    """Training and test images of a source of either kind, at the configuration's size."""
    if not is_image_folder(source):
        return load_images(source, config.data.image_size)
    return load_image_folder(source, _layout(config), config.data.image_size)


def _holds_images(source: str) -> bool:
    return is_image_folder(source) or is_image_source(source)


def _layout(config: TrainConfig) -> FolderLayout:
    data = config.data
    named = (data.text, data.label) != ("text", "label")  # the defaults are those of texts
    return FolderLayout(
        *((data.text, data.label) if named else ("file", "label")),
        separator=data.label_separator,
        labels=tuple(data.labels),
        no_label=data.no_label,
    )
