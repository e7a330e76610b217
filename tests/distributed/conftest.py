"""What tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from distributed.world import without_looks


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of torchrun's agents, which lives on when processes are started again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "one"}
    place |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    return store


@pytest.fixture
def no_looks() -> Iterator[None]:
    """For broken mechanisms beside the guard, which has found nothing in the sound ones."""
    with without_looks():
        yield
