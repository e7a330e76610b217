"""What ranks compare: short digests of what has to be the same on all of them."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.examples import UserBatch
from quietgrad.loading.reading import digest_of
from quietgrad.randomness import RandomKey
from quietgrad.sending import read_together
from quietgrad.tensors import Batch, is_spread, local_of, tensors_of

WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**22  # entries
MOST_FACTS = 12
NOT_KNOWN = ""  # of the precision: what a rank says that has not looked yet
LOOKED_AT = 64  # records of a data set that ranks compare

# What is compared at an agreement, and what to do where it differs.
REMEDIES = {
    "weights": "start every rank from the same weights (the same checkpoint, or the same "
    "torch.manual_seed before the model is made), and let all step alike",
    "weights of cut layers": "start ranks that hold the same part of a layer from the same weights",
    "sharded weights": "start ranks that share records from the same weights",
    "parameters": "give every rank the same model, with the same trainable parameters, cut by one "
    "plan where it is cut, in one dtype and on one kind of device",
    "shares": "make the same loader on every rank, with the same physical_batch_size and steps",
    "claim": "build the same plan on every rank",
    "precision": "run the whole step in torch.autocast on all ranks or on none, with parameters of "
    "one dtype",
    "drawing": "use one kind of device and the same versions of numpy and torch everywhere",
    "session": "start the run on all ranks together, once",
    "records": "give every rank the whole data set, in the same order, with no sampler and no "
    "shuffling of its own (seed first what is made or split at random); shares are the run's",
    "passes": "use one kind of device and the same versions of numpy and torch everywhere: ranks "
    "whose parameters are sharded make the same passes",
    "loss": "give run.backward one and the same function at every step, made once before the loop, "
    "on every rank (where it is a new one on some ranks alone, those would look at it anew, and "
    "wait for the others), and let all ranks call train(), eval() and requires_grad_() alike",
    "micro-batch": "ranks that hold parts of one model run the same records: make batches alike on "
    "all of them (the run's loader, and a collate_fn that draws no random numbers of its own, or "
    "from generators that are seeded alike)",
    "model": "build the same model on every rank, from one version of your code: the same layers "
    "in the same order, sharded and checkpointed alike",
    "loss function": "give run.backward the same function on every rank, from one version of your "
    "code (what one rank alone does, such as a log, stands in a branch of it)",
    "reading": "let a record be the same whenever it is read, and augment in collate_fn: records "
    "that change from reading to reading cannot be compared between ranks",
}


def digest(*parts: object) -> str:
    """16 hexadecimal digits of texts and of what ``repr`` says of the rest."""
    told = "\0".join(part if isinstance(part, str) else repr(part) for part in parts)
    return hashlib.blake2b(told.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def message(well: bool, place: str, facts: Mapping[str, str], examples: int) -> Tensor:
    """What a rank tells the others, of one size whatever it is."""
    assert len(facts) <= MOST_FACTS
    told = [_number(value) for value in facts.values()]
    head = [int(well), _number(place), examples]
    numbers = [*head, *told, *[0] * (MOST_FACTS - len(told))]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _number(text: str) -> int:
    """A digest of text as a signed number of 64 bits."""
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def apart(name: str, said: Mapping[int, int], compared: Iterable[Iterable[int]]) -> str:
    """Two ranks that say different things of a fact; nothing where none do.

    Args:
        name: of the fact.
        said: by rank; those that are not asked are not in it.
        compared: ranks that have to say the same.
    """
    nothing = _number(NOT_KNOWN) if name == "precision" else None
    for some in compared:
        known = [rank for rank in some if rank in said and said[rank] != nothing]
        for rank in known[1:]:
            if said[rank] != said[known[0]]:
                return f"ranks {known[0]} and {rank}"
    return ""


def versions() -> str:
    """Of what the numbers of a rank depend on."""
    own = getattr(sys.modules["quietgrad"], "__version__", "")
    return digest(torch.__version__, np.__version__, own, sys.version_info[:2])


def weights_digest(model: nn.Module, told: Callable[[Tensor], bool] | None = None) -> str:
    """Of all parameters, frozen ones too: names, shapes, types and bits. Cost: a pass over them.

    Args:
        model: the user's.
        told: of which parameters the bits are told; None: of those that every rank holds.
    """
    chosen = is_everywhere if told is None else told
    digested, sums = hashlib.blake2b(digest_size=8), []
    for name, p in model.named_parameters():
        digested.update(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}\0".encode())
        if not chosen(p):
            continue
        here = local_of(p)
        width = WIDTHS.get(here.element_size())
        plain = type(here) in (Tensor, nn.Parameter)
        if plain and width is not None:  # else a library's own layout
            for part in here.detach().contiguous().view(-1).view(width).split(CHUNK):
                if part.device.type == "cpu":
                    digested.update(part.numpy().tobytes())
                else:
                    sums += _sums_of_bits(part)
    digested.update(repr(read_together(sums)).encode() if sums else b"")
    return digested.hexdigest()


def is_everywhere(parameter: Tensor) -> bool:
    """Whether every rank holds a copy of it."""
    spread: Any = parameter
    return not is_spread(parameter) or all(p.is_replicate() for p in spread.placements)


def _sums_of_bits(part: Tensor) -> list[Tensor]:
    """What stands for the bits of what no processor holds: their sum, and one by place. Formed
    where they are, and read together: each reading would wait for the device.
    """
    wide = part.to(torch.int64)
    by_place = wide * torch.arange(1, len(wide) + 1, device=wide.device)
    return [wide.sum(), by_place.sum()]


def batch_digest(batch: Batch) -> str:
    """Of all tensors of a micro-batch: shapes, types and bits, and which records are one user's.
    Cost: a pass over them.
    """
    told, sums = hashlib.blake2b(digest_size=8), []
    if isinstance(batch, UserBatch):
        told.update(f"users {[int(size) for size in batch.sizes]}\0".encode())
    for t in tensors_of(batch):
        told.update(f"{tuple(t.shape)} {t.dtype}\0".encode())
        width = WIDTHS.get(t.element_size())
        plain = t.detach().contiguous()
        flat = plain.view(-1) if width is None else plain.view(-1).view(width)
        for part in flat.split(CHUNK):
            if width is None:
                told.update(repr(part.tolist()).encode())
            elif part.device.type == "cpu":
                told.update(part.numpy().tobytes())
            else:
                sums += _sums_of_bits(part)
    told.update(repr(read_together(sums)).encode() if sums else b"")
    return told.hexdigest()


def shapes_digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes, dtypes and kind of device, in order."""
    return digest([(n, tuple(t.shape), str(t.dtype), t.device.type) for n, t in tensors.items()])


def records_digest(dataset: Any, key: RandomKey) -> tuple[str, bool]:
    """Of some records of a data set, the same places on every rank, and whether reading them twice
    gives the same.

    Torch's, numpy's and Python's own generators are seeded alike before each record and put back,
    so that augmentation which draws from them compares as equal.

    Args:
        dataset: records by number.
        key: of the session: the places are secret, and no data set is made to pass.
    """
    size = len(dataset)
    places = key.generator("seal", 1, "records").integers(0, size, min(LOOKED_AT, size))
    once, twice = ([_record_digest(dataset, int(place), key) for place in places] for _ in range(2))
    return digest(size, once), once == twice


def _record_digest(dataset: Any, place: int, key: RandomKey) -> str:
    seed = key.words("seal", 2, str(place))[0] >> 33
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            record = dataset[place]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
    return digest_of(record).hex()
