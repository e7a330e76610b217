"""Lightning's ModelParallelStrategy (FSDP2): every process holds a shard of each parameter, and the
run's weights are those of one process, to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_modules import ADVICE, PRIVACY, STEPS, StopAt, loader, records, saving, trainer
from processes import on_processes
from test_lightning_ranks import InFloat64, equal
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from quietgrad.ledger import read_ledger

pytestmark = [
    *ADVICE,
    pytest.mark.distributed,
    pytest.mark.usefixtures("first_looks_alone"),
    # last.ckpt is a directory that is written again.
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


class Sharded(InFloat64):
    """Each layer by itself, and what is left of the network."""

    def configure_model(self) -> None:
        if any(isinstance(p, DTensor) for p in self.parameters()):
            return  # Lightning calls this again before an evaluation
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def trained(devices: int, place: str, checkpoint: str = "", stop_at: int = 0) -> Any:
    """Whole weights, how they were held, what was logged, epsilon."""
    changes: dict[str, Any] = saving(Path(place), 2) | {"devices": devices}
    kind: type[InFloat64] = InFloat64
    if devices > 1:
        kind = Sharded
        changes["strategy"] = ModelParallelStrategy(devices, 1)
    if stop_at:
        changes["callbacks"].append(StopAt(stop_at))
    lightning.seed_everything(0)
    model, fit = kind(), trainer(Path(place), **changes)
    public = DataLoader(records(20, 1), batch_size=5)
    fit.fit(model, loader(8), public, ckpt_path=checkpoint or None)
    weights = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }
    logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    return weights, logged, model.epsilon(), [type(p).__name__ for p in model.parameters()]


def test_two_processes_of_shards_end_with_the_weights_of_one(tmp_path: Path) -> None:
    (alone,) = on_processes(1, tmp_path / "a", trained, 1, str(tmp_path / "alone"))
    for found in on_processes(2, tmp_path / "b", trained, 2, str(tmp_path / "both")):
        equal(found, alone)
        assert set(found[3]) == {"DTensor"}
        assert found[2] == alone[2] == PRIVACY.build(100).epsilon
        assert found[1]["val_loss"] == pytest.approx(alone[1]["val_loss"], rel=1e-9)
    assert read_ledger(tmp_path / "both" / "ledger.jsonl").releases == STEPS
    assert not (tmp_path / "both" / "secrets.json").exists()


def test_a_run_of_shards_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    (whole,) = on_processes(1, tmp_path / "a", trained, 1, str(tmp_path / "whole"))
    place = tmp_path / "both"
    on_processes(2, tmp_path / "s", trained, 2, str(place), "", 4)
    assert read_ledger(place / "ledger.jsonl").releases == 4
    last = str(place / "kept" / "last.ckpt")
    # Fewer than two cannot, and say so before the start is counted.
    before = (place / "ledger.jsonl").read_bytes()
    (found,) = on_processes(1, tmp_path / "o", trained, 1, str(place), last)
    assert "last.ckpt' holds shards, which ModelParallelStrategy saved" in found
    assert (place / "ledger.jsonl").read_bytes() == before
    for found in on_processes(3, tmp_path / "r", trained, 3, str(place), last):
        equal(found, whole)
        assert found[2] == whole[2]
    assert read_ledger(place / "ledger.jsonl").releases == STEPS


def test_a_run_of_one_process_goes_on_with_shards(tmp_path: Path) -> None:
    (whole,) = on_processes(1, tmp_path / "a", trained, 1, str(tmp_path / "whole"))
    place = tmp_path / "run"
    on_processes(1, tmp_path / "s", trained, 1, str(place), "", 4)
    last = str(place / "kept" / "last.ckpt")
    for found in on_processes(2, tmp_path / "r", trained, 2, str(place), last):
        equal(found, whole)
        assert set(found[3]) == {"DTensor"} and found[2] == whole[2]
