"""An early stop looks like an end, and leaves what the run's noise follows from in its folder."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning_modules
import private_trainers
import pytest

from quietgrad.checks import SettingsWarning
from quietgrad.noise import BandedNoise

pytestmark = lightning_modules.ADVICE
OWN = replace(private_trainers.PRIVACY, seed=None, data_are_public=False)
SAID = r"ended after 3 of 10 releases.*secrets stay in .{}. \({}\), by which its noise could be"


def by_transformers(folder: Path, privacy: Any, stops: bool = True) -> None:
    stop = [private_trainers.StopAt(3)] if stops else []
    private_trainers.trainer(folder, privacy=privacy, callbacks=stop).train()


def by_lightning(folder: Path, privacy: Any, stops: bool = True) -> None:
    stop = [lightning_modules.StopAt(3)] if stops else []
    module = lightning_modules.Small(privacy=privacy)
    fit = lightning_modules.trainer(folder, callbacks=stop, limit_val_batches=0)
    fit.fit(module, lightning_modules.loader(20))


@pytest.mark.parametrize("train", [by_transformers, by_lightning])
def test_an_early_stop_says_which_secrets_stay(train: Any, tmp_path: Path) -> None:
    """Before: nothing was said, and the roots of correlated noise went with the folder."""
    with pytest.warns(SettingsWarning, match=SAID.format(tmp_path, "secrets.json.*")):
        train(tmp_path, replace(OWN, noise=BandedNoise(2)))
    assert (tmp_path / "secrets.json").exists()


@pytest.mark.parametrize("train", [by_transformers, by_lightning])
def test_where_none_stays_nothing_is_said(train: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingsWarning)
        train(tmp_path / "stopped", OWN)  # independent noise keeps none
        train(tmp_path / "ended", replace(OWN, noise=BandedNoise(2)), stops=False)
    assert not list(tmp_path.rglob("secrets.json*"))
