"""What a plan that goes on with a ledger says otherwise than the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

SHOWN = 4  # of many: a schedule has a number for every step
REMEDY = (
    "resume with the settings and records of the first start, or begin a new run directory (its "
    "epsilon adds to this one's)"
)
OTHER_RECORDS = "the records are others than at the first start: "
UNSET = "not set"


class ChangedSettings(ValueError):
    """A plan is another one than that of the ledger it would go on with."""

    def __init__(self, changes: Sequence[str]) -> None:
        self.changes = changes
        more = f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        why = OTHER_RECORDS if any(c.startswith("dataset_size ") for c in changes) else ""
        super().__init__(
            f"resume with a changed privacy setting: {'; '.join(changes[:SHOWN])}{more}; {why}"
            f"{REMEDY}"
        )


def changes(was: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """ "name was this and is now that" of each value of ``now``, however deep, that ``was`` has
    otherwise.
    """
    return [text for name, value in now.items() for text in _changes(name, was.get(name), value)]


def _changes(name: str, was: object, now: object) -> Iterator[str]:
    if was == now:
        return
    if isinstance(was, Mapping) or isinstance(now, Mapping):
        before, after = _keys(was), _keys(now)
        for key in before | after:  # in their order, not sorted
            yield from _changes(f"{name}.{key}", before.get(key), after.get(key))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (first, second) in enumerate(zip(was, now, strict=True)):
            yield from _changes(f"{name}[{index}]", first, second)
    elif isinstance(was, list) or isinstance(now, list):
        yield f"{name} has another length or form"
    else:
        yield f"{name} was {_word(was)} and is now {_word(now)}"


def _keys(value: object) -> dict[str, object]:
    """Of what is no table, the kind alone: a rule that is not there has none."""
    return dict(value) if isinstance(value, Mapping) else {"kind": value}


def _word(value: object) -> str:
    if value is None:
        return UNSET
    return str(value).lower() if isinstance(value, bool) else repr(value)
