"""What tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from quietgrad.clipping.soundness import guard


@pytest.fixture(scope="module")
def first_looks_alone() -> Iterator[None]:
    """For tests of many short trainings: guards look at a run's first release, and at the second
    and the fourth no more. Looks were seven tenths of such a test's time; that they are made, and
    what they see, is the subject of others.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "is_guarded", lambda step: step == 0)
        yield


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
