"""Tables whose [i] is no record: of a pandas DataFrame it is a column, and one row is in all."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from quietgrad import PrivacyConfig
from quietgrad.integrations.opacus import PrivacyEngine

N = 20
SQUARE = pd.DataFrame(np.eye(N, dtype="float32"))  # its columns are as many as its rows
PRIVACY = PrivacyConfig(
    noise_multiplier=1.0, sample_rate=0.5, steps=2, seed=1, data_are_public=True
)


def rows(found: list[Any]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.asarray(one)) for one in found])


@pytest.mark.parametrize("table", [SQUARE, SQUARE[0]])
def test_a_run_takes_no_columns_for_records(table: Any) -> None:
    with (
        PRIVACY.build(N).start() as run,
        pytest.raises(TypeError, match=r"pandas .* of which \[i\] is the column"),
    ):
        run.loader(table, collate_fn=rows)


def test_an_opacus_script_takes_none_either() -> None:
    model = nn.Linear(N, 1)
    _, _, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(SQUARE, batch_size=10, collate_fn=rows),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(TypeError, match="pandas DataFrame"):
        next(iter(loader))


def test_a_trainer_takes_none_either() -> None:
    from quietgrad.integrations.transformers.refusals import refuse_data

    with pytest.raises(TypeError, match="train_dataset is a pandas DataFrame"):
        refuse_data(SQUARE, None)


def test_lightning_takes_none_either() -> None:
    from quietgrad.integrations.lightning.data import training_data

    with pytest.raises(TypeError, match="pandas DataFrame"):
        training_data(DataLoader(SQUARE, batch_size=4))


SPLITS = {"train": [{"x": 1.0}], "test": [{"x": 2.0}]}


@pytest.mark.parametrize("several", [SPLITS, UserDict(input_ids=[[1]], labels=[0])])
def test_a_dictionary_of_data_sets_or_columns_is_none(several: Any) -> None:
    """It has as many entries as splits or columns, and was counted as so many records."""
    from quietgrad.integrations.lightning.data import training_data
    from quietgrad.integrations.transformers.refusals import refuse_data

    said = r'which has no record 0.*give one of its data sets \({}\["train"\], say\)'
    with pytest.raises(TypeError, match=said.format("train_dataset")):
        refuse_data(several, None)
    with pytest.raises(TypeError, match=said.format("dataset")):
        training_data(several)
    with PRIVACY.build(2).start() as run, pytest.raises(TypeError, match=said.format("dataset")):
        run.loader(several)
