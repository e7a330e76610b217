"""Frozen records that judge themselves: a field's annotation says what it may hold, and the same
check answers Python and a configuration file.

What a file can hold are numbers, words, true and false, and lists or mappings of them. A field of
another type (a workload, a matrix) is for Python alone: it is no key, and is not judged here.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from quietgrad.checks import as_float, nearest, require_at_least, require_finite, require_positive


@dataclass(frozen=True)
class AtLeast:
    """A bound of a number, for ``Annotated``."""

    smallest: float
    remedy: str

    @property
    def said(self) -> str:
        """In words, after what is bounded."""
        return f"of at least {self.smallest}"

    def require(self, name: str, value: float) -> None:
        require_finite(name, value)
        require_at_least(name, value, self.smallest, self.remedy)


@dataclass(frozen=True)
class Positive:
    """Above 0, for ``Annotated``."""

    said = "above 0"

    def require(self, name: str, value: float) -> None:
        require_positive(name, value)


Count = Annotated[int, AtLeast(1, "use a whole number of at least 1")]
Several = Annotated[int, AtLeast(2, "a line or an error cannot be told from one value")]
Whole = Annotated[int, AtLeast(0, "use a whole number of at least 0")]
Amount = Annotated[float, AtLeast(0, "use a number of at least 0")]
Above0 = Annotated[float, Positive()]


@dataclass(frozen=True, eq=False)
class Outline:
    """Stands for a record whose module imports much, where values are judged and no record is made.

    Attributes:
        hints: what ``hints_of`` says of the record.
    """

    hints: Mapping[str, Any]


def judge(record: Any) -> None:
    """For ``__post_init__``: every field is of its annotated type and within its bounds; whole
    numbers become floats where those are wanted, lists tuples.

    Raises:
        ValueError: whose text begins with the field's name and value, and names the remedy.
    """
    kind: Any = type(record)
    for name, hint in hints_of(kind).items():
        value = getattr(record, name)
        found = conformed(name, value, hint)
        if found is not value:
            object.__setattr__(record, name, found)


@functools.cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    """Field -> annotation, of those that a file can hold; none for what is no dataclass."""
    if isinstance(kind, Outline):
        return kind.hints
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(kind)
        if field.init and all(_held(option) for option, _ in _options(hints[field.name]))
    }


def conformed(name: str, value: Any, hint: Any) -> Any:
    """``value`` as the annotation wants it.

    Raises:
        ValueError: naming ``name``, the value, and what it may be.
    """
    found = _match(name, value, hint)
    if found is not _OTHER:
        return found
    options = [option for option, _ in _options(hint)]
    if str in options and _is_number(value):
        return str(value)  # --set training.run_dir=2024
    words = [word for option in options for word in _words(option)]
    if isinstance(value, str) and words:
        raise ValueError(f"{name}={value!r} is unknown{nearest(value, words)}")
    told = f"{name}={value!r} must be {described(hint)}"
    if isinstance(value, str) and str not in options:
        told += ", not a string"
        if _reads_as_number(value):
            told += "; write the number without quotes"
    elif value is not None and type(None) in options:
        told += "; or leave it out"
    raise ValueError(told)


def described(hint: Any) -> str:
    """What an annotation allows, in words; that a field may be None goes without saying."""
    return " or ".join(
        " ".join([_said(option), *(bound.said for bound in bounds)])
        for option, bounds in _options(hint)
        if option is not type(None)
    )


def plain(hint: Any) -> list[dict[str, Any]]:
    """An annotation of a field that a file can hold, as JSON can hold it: its alternatives."""
    return [
        _plain(option) | ({"bounds": [_plain_bound(bound) for bound in bounds]} if bounds else {})
        for option, bounds in _options(hint)
    ]


def hint_from(told: Sequence[Mapping[str, Any]]) -> Any:
    """The annotation of which ``plain`` told this."""
    either: Any = typing.Union
    return either[tuple(_hint(alternative) for alternative in told)]


def _plain(option: Any) -> dict[str, Any]:
    if words := _words(option):
        return {"words": list(words)}
    kind = typing.get_origin(option)
    if kind is None:
        return {"type": next(name for name, known in SCALARS.items() if known is option)}
    holder = next(name for name, known in HOLDERS.items() if known is kind)
    return {"type": holder, "of": plain(typing.get_args(option)[kind is Mapping])}


def _plain_bound(bound: Any) -> list[Any]:
    return [bound.smallest, bound.remedy] if isinstance(bound, AtLeast) else []


def _hint(told: Mapping[str, Any]) -> Any:
    literal: Any = typing.Literal
    annotated: Any = typing.Annotated
    option: Any = SCALARS.get(told.get("type", ""))
    if "words" in told:
        option = literal[tuple(told["words"])]
    elif option is None:
        kind, of = HOLDERS[told["type"]], hint_from(told["of"])
        option = kind[{list: of, tuple: (of, ...), Mapping: (str, of)}[kind]]
    for bound in told.get("bounds", ()):
        option = annotated[option, AtLeast(*bound) if bound else Positive()]
    return option


SCALARS = {"bool": bool, "int": int, "float": float, "str": str, "none": type(None)}
HOLDERS: dict[str, Any] = {"list": list, "tuple": tuple, "mapping": Mapping}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_OTHER = object()  # not of the type


def _match(name: str, value: Any, hint: Any) -> Any:
    """The value as one alternative of the annotation, within its bounds; ``_OTHER`` if as none."""
    for option, bounds in _options(hint):
        found = _as(name, value, option)
        if found is not _OTHER:
            for bound in bounds:
                bound.require(name, found)
            return found
    return _OTHER


def _as(name: str, value: Any, option: Any) -> Any:
    if _words(option):
        return value if value in _words(option) else _OTHER
    if option is float:
        return as_float(name, value) if _is_number(value) else _OTHER
    if option is int:
        return int(value) if _is_number(value) and isinstance(value, Integral) else _OTHER
    kind, parts = typing.get_origin(option), typing.get_args(option)
    if kind is None:
        return value if isinstance(value, option) else _OTHER
    if not isinstance(value, Mapping if kind is Mapping else list | tuple):
        return _OTHER
    of = parts[1] if kind is Mapping else parts[0]
    pairs = dict(value if kind is Mapping else enumerate(value)).items()
    found = {key: _match(f"{name}[{key!r}]", part, of) for key, part in pairs}
    if _OTHER in found.values():
        return _OTHER
    return found if kind is Mapping else kind(found.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _options(hint: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Alternatives of a union, each with its bounds."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [found for option in typing.get_args(hint) for found in _options(option)]
    if typing.get_origin(hint) is Annotated:
        bare, *bounds = typing.get_args(hint)
        return [(bare, tuple(bounds))]
    return [(hint, ())]


def _words(option: Any) -> tuple[Any, ...]:
    return typing.get_args(option) if typing.get_origin(option) is Literal else ()


def _said(option: Any) -> str:
    if words := _words(option):
        return " or ".join(map(repr, words))
    kind, parts = typing.get_origin(option), [p for p in typing.get_args(option) if p is not ...]
    if kind in (list, tuple):
        return f"a list, each entry {described(parts[0])}"
    if kind is Mapping:
        return f"a table, each value {described(parts[1])}"
    return KINDS.get(option, str(option))


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _held(option: Any) -> bool:
    """Whether a file can hold it."""
    parts = [part for part in typing.get_args(option) if part is not ...]
    if typing.get_origin(option) in (list, tuple, Mapping):
        return all(_held(bare) for part in parts for bare, _ in _options(part))
    return bool(_words(option)) or option in (int, float, bool, str, type(None))
