"""Training, validation and test records: who is where follows from each record alone, and which
labels there are from public records alone.

Records never change sides when others come or go, and records whose text is equal after normalising
(case, white space, links, user names, punctuation) are on the same side; where users are protected,
all records of a user are. A training record that
cannot be used stays a record, counts, and contributes nothing to any sum.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quietgrad.checks import how_many, nearest
from quietgrad.training.sources.guess import MOST_FRACTIONS, fractional

# Label of a record whose loss is zero, or of a token that is not learnt; what torch's cross entropy
# leaves out.
IGNORED = -100
# More labels than this, and than half of the public records, are no classes.
MOST_LABELS = 20
_LINK = re.compile(r"https?://\S+|www\.\S+|@\w+")
_OTHER = re.compile(r"[\W_]+")
_POINTED = re.compile(r"(-?[0-9]+)\.0+")

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Splits(Generic[Kind]):
    """Training records (private), validation and test records (declared public)."""

    train: Kind
    validation: Kind
    test: Kind


class TextRecords(Protocol):
    """Records with a text each, by whose hash they are divided."""

    @property
    def texts(self) -> tuple[str, ...]: ...

    @property
    def source(self) -> str: ...

    def __len__(self) -> int: ...

    @property
    def owners(self) -> tuple[bytes, ...] | None: ...

    def subset(self, indices: NDArray[np.int64]) -> Any: ...


Texts = TypeVar("Texts", bound=TextRecords)
Labelled = TypeVar(
    "Labelled", bound=Any
)  # a frozen dataclass of records with labels and label_names


def normalised_texts(records: TextRecords) -> list[str]:
    return [normalised(t) for t in records.texts]


def split_with_test(
    texts: Texts,
    test: Texts,
    validation_fraction: float,
    known_by: Callable[[Texts], Sequence[str]] = normalised_texts,
) -> Splits[Texts]:
    """Training and validation records by a hash of the normalised text, beside test records that
    are given; those that are a test record, or of a test record's user, are left out.

    Args:
        texts, test: records.
        validation_fraction: of those that are not left out.
        known_by: [n] what a record is known by in both.

    Raises:
        ValueError: for a fraction outside (0, 1) or a part that would be empty.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"data.validation_fraction={validation_fraction!r} must be in (0, 1)")
    held = set(known_by(test))
    position = _positions(texts)
    free = np.array([known not in held for known in known_by(texts)])
    if texts.owners is not None:
        # A user of the test records is public: none of the user's records is private.
        public = set(test.owners or ())
        free &= np.array([owner not in public for owner in texts.owners])
    validation = free & (position < validation_fraction)
    train = free & ~validation
    for part, members in (("training", train), ("validation", validation)):
        if not members.any():
            raise ValueError(
                f"data.source={texts.source!r} has {_amount(texts)}, too few for a {part} part "
                "beside the test records"
            )
    return Splits(
        texts.subset(np.flatnonzero(train)), texts.subset(np.flatnonzero(validation)), test
    )


def split(texts: Texts, validation_fraction: float, test_fraction: float) -> Splits[Texts]:
    """Divides records by a hash of the normalised text, or of their user.

    Raises:
        ValueError: for fractions outside (0, 1) or a part that would be empty.
    """
    for name, fraction in (
        ("data.validation_fraction", validation_fraction),
        ("data.test_fraction", test_fraction),
    ):
        if not 0 < fraction < 1:
            raise ValueError(f"{name}={fraction!r} must be in (0, 1)")
    if validation_fraction + test_fraction >= 1:
        raise ValueError(
            "data.validation_fraction and data.test_fraction leave no training records; choose "
            "smaller ones"
        )
    position = _positions(texts)
    test = position < test_fraction
    validation = ~test & (position < test_fraction + validation_fraction)
    train = ~test & ~validation
    for part, members in (("training", train), ("validation", validation), ("test", test)):
        if not members.any():
            raise ValueError(
                f"data.source={texts.source!r} has {_amount(texts)}, too few for a {part} "
                "part; add records or change the fractions"
            )
    return Splits(*(texts.subset(np.flatnonzero(members)) for members in (train, validation, test)))


def _amount(texts: TextRecords) -> str:
    """For messages: of users' records the number is private."""
    if texts.owners is None:
        return how_many(len(texts), "record")
    return f"records of {how_many(len(set(texts.owners)), 'user')}"


def with_public_labels(splits: Splits[Labelled], given: Sequence[str] = ()) -> Splits[Labelled]:
    """The splits with a list of labels that is public: ``given`` (data.labels), or that of
    validation and test records.

    A training record whose label is not in the list becomes one that is ignored: it says nothing of
    itself and changes no other.

    Raises:
        ValueError: for fewer than two labels, or a validation or test record that cannot be used.
    """
    parts = (splits.train, splits.validation, splits.test)
    words = [[None if i == IGNORED else part.label_names[i] for i in part.labels] for part in parts]
    public = [word for part in words[1:] for word in part]
    if None in public:
        raise ValueError(
            f"data.source={splits.train.source!r}: a validation or test record lacks a text or a "
            "label; `quietgrad check` lists them for you alone: remove them, or leave out all such "
            "records with data.skip_bad=true"
        )
    names = tuple(given) or tuple(sorted({word for word in public if word is not None}))
    unknown = next((word for word in public if word not in names), None)
    if unknown is not None:
        raise ValueError(
            f"data.source={splits.train.source!r}: label {unknown!r} of a validation or test "
            f"record is not in data.labels{nearest(unknown, names)}"
        )
    if not given and len(names) > max(MOST_LABELS, len(public) // 2):
        raise ValueError(
            f"data.source={splits.train.source!r}: {len(public)} validation and test records have "
            f"{len(names)} different labels; classes are wanted here, not numbers or names: check "
            "data.label, or list the classes in data.labels"
        )
    if not given and len(names) > MOST_FRACTIONS and fractional(names):
        raise ValueError(
            f"data.source={splits.train.source!r}: the {len(names)} labels of validation and test "
            "records are numbers with fractions, and each would be a class of its own; make "
            "classes of them, or list the classes in data.labels"
        )
    twice = _one_number_twice(names)
    if twice is not None:
        raise ValueError(
            f"data.source={splits.train.source!r}: the labels {twice[0]!r} and {twice[1]!r} of "
            "validation and test records are one number in two spellings, and would be two "
            "classes; write it alike in all files"
        )
    if len(names) < 2:
        raise ValueError(
            f"data.source={splits.train.source!r}: the validation and test records have the single "
            f"label {names[0]!r}; classification needs at least two (data.labels)"
        )
    index = {name: i for i, name in enumerate(names)}
    made = [
        replace(
            part,
            labels=np.array(
                [IGNORED if w is None else index.get(w, IGNORED) for w in found], dtype=np.int64
            ),
            label_names=names,
        )
        for part, found in zip(parts, words, strict=True)
    ]
    if (made[0].labels == IGNORED).all():
        raise ValueError(
            f"data.source={splits.train.source!r}: no training record has a text and a label that "
            "validation or test records have; check data.text, data.label and data.labels"
        )
    return Splits(*made)


def _one_number_twice(names: Sequence[str]) -> tuple[str, str] | None:
    """Two labels that differ in zeros behind a point: a tool wrote 1 as 1.0 in one of the files."""
    pointed = ((found[1], name) for name in names if (found := _POINTED.fullmatch(name)))
    return next((both for both in pointed if both[0] in names), None)


def normalised(text: str) -> str:
    """Lower case, without links, user names, punctuation and repeated white space; the raw text if
    nothing is left of it.
    """
    kept = _OTHER.sub(" ", _LINK.sub(" ", text.lower())).strip()
    return kept or text.strip()


def _positions(texts: TextRecords) -> NDArray[np.float64]:
    """[n] numbers in [0, 1) that decide the part. A user's records have one: validation and test
    records are published, so a user who is protected may have none there.
    """
    keys: Iterable[bytes] = (
        (normalised(t).encode("utf-8", "surrogatepass") for t in texts.texts)
        if texts.owners is None
        else texts.owners
    )
    digests = (hashlib.sha256(key).digest() for key in keys)
    return np.array([int.from_bytes(digest[:8], "big") / 2**64 for digest in digests])
