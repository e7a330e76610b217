"""Lightning's Trainer on several processes, each with the whole model: one run, one ledger, and the
weights of one process, to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning_modules import (
    ADVICE,
    PRIVACY,
    STEPS,
    Small,
    StopAt,
    loader,
    records,
    saving,
    trainer,
)
from processes import on_processes
from torch.multiprocessing import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from quietgrad.ledger import read_ledger

pytestmark = [*ADVICE, pytest.mark.distributed]


class InFloat64(Small):
    """Without dropout, whose masks are others on several processes."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].p = 0.0
        self.double()

    def per_example_loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x.double()), y, reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x.double()), y), sync_dist=True)


def trained(devices: int, place: str, checkpoint: str = "", stop_at: int = 0) -> Any:
    """Weights, what was logged, epsilon."""
    changes = saving(Path(place), 2) | {"devices": devices}
    if devices > 1:
        changes["strategy"] = "ddp"
    if stop_at:
        changes["callbacks"].append(StopAt(stop_at))
    model, fit = InFloat64(), trainer(Path(place), **changes)
    public = DataLoader(records(20, 1), batch_size=5)
    fit.fit(model, loader(8), public, ckpt_path=checkpoint or None)
    weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
    logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    return weights, logged, model.epsilon()


def equal(found: Any, expected: Any) -> None:
    assert not isinstance(found, str), found
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)


def test_two_processes_end_with_the_weights_of_one(tmp_path: Path) -> None:
    (alone,) = on_processes(1, tmp_path / "a", trained, 1, str(tmp_path / "alone"))
    for found in on_processes(2, tmp_path / "b", trained, 2, str(tmp_path / "both")):
        equal(found, alone)
        assert found[2] == alone[2] == PRIVACY.build(100).epsilon
        assert found[1]["epsilon"] == alone[1]["epsilon"] >= alone[2]
        assert found[1]["val_loss"] == pytest.approx(alone[1]["val_loss"], rel=1e-9)
    assert read_ledger(tmp_path / "both" / "ledger.jsonl").releases == STEPS
    assert not (tmp_path / "both" / "secrets.json").exists()


def test_a_run_of_two_processes_goes_on_with_one_and_the_other_way(tmp_path: Path) -> None:
    (whole,) = on_processes(1, tmp_path / "a", trained, 1, str(tmp_path / "whole"))
    for first, then in ((2, 1), (1, 2)):
        place = tmp_path / f"{first}-{then}"
        on_processes(first, tmp_path / f"s{first}", trained, first, str(place), "", 4)
        assert read_ledger(place / "ledger.jsonl").releases == 4
        last = str(place / "kept" / "last.ckpt")
        for found in on_processes(then, tmp_path / f"r{first}", trained, then, str(place), last):
            equal(found, whole)


def test_what_the_first_process_refuses_is_refused_by_all(tmp_path: Path) -> None:
    on_processes(2, tmp_path / "a", trained, 2, str(tmp_path / "run"), "", 2)
    for found in on_processes(2, tmp_path / "b", trained, 2, str(tmp_path / "run")):
        assert "holds a private run already" in found


def test_nothing_is_averaged_behind_the_run(tmp_path: Path) -> None:
    """DistributedDataParallel would add gradients up whose noise is drawn once for all."""

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            assert type(trainer.strategy.model) is DistributedDataParallel
            assert not trainer.strategy.model.require_backward_grad_sync

    def steps() -> int:
        fit = trainer(tmp_path / "run", devices=2, strategy="ddp", callbacks=[Seen()])
        fit.fit(InFloat64(), loader(8))
        return fit.global_step

    assert on_processes(2, tmp_path / "a", steps) == [STEPS, STEPS]


def test_processes_that_end_with_fit_are_refused(tmp_path: Path) -> None:
    refused = "strategy='ddp_fork'.*strategy=\"ddp\", which keeps the whole model"
    with pytest.raises(ProcessRaisedException, match=refused):
        trainer(tmp_path, devices=2, strategy="ddp_fork").fit(InFloat64(), loader(8))
