"""Classes of rows of a table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quietgrad.training.exporting.exportable import BATCH, Exportable
from quietgrad.training.files.card import BY_TORCH_ALONE, write_card
from quietgrad.training.files.provenance import FILE as DESCRIPTION_FILE
from quietgrad.training.files.provenance import Record
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.tables import BELOW_THE_HEAD
from quietgrad.training.tasks.loaded import WEIGHTS_FILE, LoadedModel, save_weights
from quietgrad.training.tasks.predictions import Predictions, classified, read_new
from quietgrad.training.tasks.records import outputs
from quietgrad.training.tasks.splits import Splits, split, split_with_test, with_public_labels
from quietgrad.training.tasks.tables.data import (
    ENCODED,
    Encoding,
    LabelledRows,
    are_from_rows,
    load_rows,
    unlabelled_rows,
)
from quietgrad.training.tasks.tables.models import PREFIX, TableClassifier, hidden_layers
from quietgrad.training.tasks.task import (
    EVALUATION_BATCH,
    OF_ANSWERS,
    OF_IMAGES,
    OF_TEXTS,
    Parts,
    Task,
    ready,
)


class TablesTask(Task):
    """Labelled rows, and a linear model or a small network; model.name begins with "table:"."""

    what = "a classifier of rows"
    unread = (
        *OF_IMAGES,
        *OF_TEXTS,
        *OF_ANSWERS,
        *(f"model.{key}" for key in BELOW_THE_HEAD),
        "task.kind",
        "data.text",
        "model.weights",
        "model.accept_start",
        "model.max_length",
        "model.train_layers",
    )

    def __init__(self, splits: Splits[LabelledRows]) -> None:
        self.splits = splits
        self.encoding = Encoding.of([splits.validation, splits.test])

    @classmethod
    def reads(cls, config: TrainConfig) -> bool:
        """Where the model is one of tables."""
        return config.model.name.startswith(PREFIX)

    @classmethod
    def load(cls, config: TrainConfig) -> TablesTask:
        """See ``Task.load``."""
        data, model = config.data, config.model
        hidden_layers(model.name)
        if model.tune != "full":
            raise ValueError(
                f"model.tune={model.tune!r}: a model of tables has nothing pretrained; set "
                "model.tune='full'"
            )
        named = (data.label, data.user, data.skip_bad)
        rows = load_rows(data.source, *named)
        if data.test_source:
            test = load_rows(data.test_source, *named, "data.test_source")
            names = _known_by(rows, test)
            splits = split_with_test(
                rows, test, data.validation_fraction, lambda some: some.known_by(names)
            )
            splits = _with_columns_of_both(splits, data.test_source)
        else:
            splits = split(rows, data.validation_fraction, data.test_fraction)
        return cls(with_public_labels(splits, data.labels))

    def read(self, config: TrainConfig, device: torch.device) -> tuple[LoadedModel, Parts]:
        """See ``Task.read``."""
        name = config.model.name
        classifier = TableClassifier(
            self.encoding.width, self.encoding.sizes, hidden_layers(name), len(self.label_names)
        )
        model = LoadedModel(classifier, None, name, config.model.tuning.how, "mean")
        splits = self.splits
        train, validation, test = (
            self.encoding.encode(part) for part in (splits.train, splits.validation, splits.test)
        )
        return ready(config, model, device), (train, validation, test)

    def how_read(self) -> object:
        """Columns, and the scales of their numbers."""
        return self.encoding.to_json()

    def save(self, model: LoadedModel, folder: Path, trained_on: Record) -> None:
        """Weights, and the encoding of cells, which is public; ``load_saved_table`` reads both."""
        save_weights(model, self.label_names, folder, trained_on, encoding=self.encoding.to_json())
        loading = (
            f"`{WEIGHTS_FILE}` is a state dict of "
            "`quietgrad.training.tasks.tables.models.TableClassifier`, and `quietgrad.json` says "
            "how cells become numbers. With Quietgrad: `quietgrad predict RUN_DIR FILE`, or "
            "`quietgrad.training.tasks.tables.task.load_saved_table`.\n\n" + BY_TORCH_ALONE
        )
        names = self.label_names
        write_card(folder, trained_on, model.name, model.tune, names, loading, "quietgrad")

    @classmethod
    def predict(
        cls, config: TrainConfig, folder: Path, file: Path, device: torch.device
    ) -> Predictions:
        """See ``Task.predict``."""
        encoding = _described(folder)[0]
        names = [*encoding.numbers, *encoding.categories]
        columns = read_new(file, dict.fromkeys(names, "every column of data.source"))
        new = unlabelled_rows(columns, names, str(file))
        model, _, labels = load_saved_table(folder)
        logits = outputs(model.to(device), encoding.encode(new), EVALUATION_BATCH, device)
        return replace(classified(columns, labels, logits), notes=encoding.strange(new))

    @classmethod
    def exportable(cls, config: TrainConfig, folder: Path) -> Exportable:
        """See ``Task.exportable``; how cells become numbers is in the metadata."""
        model, encoding, labels = load_saved_table(folder)
        numbers = torch.linspace(-1, 1, 2 * encoding.width).reshape(2, encoding.width)
        codes = torch.zeros(2, len(encoding.sizes), dtype=torch.long)
        axes = dict.fromkeys(("numbers", "codes"), (BATCH,))
        facts = {"encoding": encoding.to_json(), "encoded": ENCODED}
        inputs = {"numbers": numbers, "codes": codes}
        return Exportable(model, inputs, axes, labels, facts=facts)


def _known_by(rows: LabelledRows, test: LabelledRows) -> list[str]:
    """Columns by which a row is known to be a test row too: an index that a tool wrote into the
    test file alone tells none apart. In JSON one private row may have brought a column that test
    rows have, so there all of both count.
    """
    others = test.columns.keys() - rows.columns.keys() if are_from_rows(rows.source) else set()
    return sorted([*rows.columns, *others])


def _with_columns_of_both(splits: Splits[LabelledRows], test_source: str) -> Splits[LabelledRows]:
    """The parts with the columns that test rows have. One that they lack, and that no validation
    row fills, may be a key of one private JSON record: it goes, and nothing is said of it.

    Raises:
        ValueError: for a column that public rows of data.source fill, and test rows do not have.
    """
    known, filled = splits.test.columns, splits.validation.columns
    absent = next((name for name in filled if name not in known and any(filled[name])), None)
    if absent is not None:
        raise ValueError(
            f"data.test_source={test_source!r} lacks the column {absent!r} of data.source; add it "
            "there, or remove it from data.source"
        )
    train, validation = (
        replace(part, columns={k: v for k, v in part.columns.items() if k in known})
        for part in (splits.train, splits.validation)
    )
    return Splits(train, validation, splits.test)


def load_saved_table(folder: str | Path) -> tuple[TableClassifier, Encoding, list[str]]:
    """The trained model in evaluation mode, how it reads cells, and the labels' names.

    Args:
        folder: RUN_DIR/model.

    Raises:
        ValueError: if the folder holds no model of tables.
    """
    from safetensors.torch import load_file

    encoding, facts = _described(folder)
    model = TableClassifier(
        encoding.width, encoding.sizes, hidden_layers(facts["base"]), len(facts["labels"])
    )
    model.load_state_dict(load_file(str(Path(folder) / WEIGHTS_FILE)))
    return model.eval(), encoding, facts["labels"]


def _described(folder: str | Path) -> tuple[Encoding, dict[str, Any]]:
    description = Path(folder) / DESCRIPTION_FILE
    facts = json.loads(description.read_text()) if description.is_file() else {}
    if "encoding" not in facts:
        raise ValueError(
            f"folder={str(folder)!r} holds no model of tables; pass RUN_DIR/model of such a run"
        )
    return Encoding.from_json(facts["encoding"]), facts
