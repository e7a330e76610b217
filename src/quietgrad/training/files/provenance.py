"""What the library's own outputs were trained on and how, kept with them, so that none passes for a
public start by accident.

A run without privacy leaves its records in its weights; a private run has spent its epsilon on
them, and a second run on the same records that starts there spends both. Neither can be told from a
public model by its weights, so the record travels with them: in ``quietgrad.json`` beside them and
in the header of every safetensors file, which is often copied alone.

The record names the source of the data and holds no digest of them. A hash of a record is a
membership test that anyone can make: it would publish exactly what a private run protects, and even
beside weights that were trained without privacy it tells more, and more surely, than they do. A
keyed digest would need the key wherever the check is made. So whether two runs share records cannot
be checked here, and a start is refused whatever the records are, unless it is asked for by name.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from quietgrad.durable import write_whole
from quietgrad.ledger.earlier import EPSILONS_ADD as EPSILONS_ADD
from quietgrad.ledger.earlier import RUN, STARTS
from quietgrad.ledger.earlier import WITHOUT_PRIVACY as WITHOUT_PRIVACY
from quietgrad.ledger.earlier import start_warnings as start_warnings
from quietgrad.ledger.earlier import starts_of as starts_of

FILE = "quietgrad.json"
# in quietgrad.json, and in the header of safetensors files, whose values are strings
KEY = "quietgrad_trained_on"
ADAPTERS = "adapter_config.json"  # PEFT's
Start = Literal["trained-without-privacy", "epsilons-add"]

Record = dict[str, Any]


def provenance(
    source: str,
    facts: Mapping[str, Any] | None,
    data_are_public: bool,
    started_from: tuple[Record, ...] = (),
    run: str = "",
) -> Record:
    """What an output says of the run that made it: public facts alone.

    Args:
        source: name of the data.
        facts: epsilon, delta and so on of a private run; None for one without privacy.
        data_are_public: whether the training records were declared public.
        started_from: the records of the outputs that it started from, where that was asked for.
        run: its name, as its ledger has it: by that weights in memory are known to be the same
            run's; "" without a ledger.
    """
    # A path of the user's machine is nobody's business; the name is for people.
    name = (
        Path(source).name
        if os.sep in source and not source.startswith(("packaged:", "torchvision:"))
        else source
    )
    return {
        "private": facts is not None,
        "data": name,
        "data_declared_public": data_are_public,
        **(facts or {}),
        **({RUN: run} if run else {}),
        "started_from": list(started_from),
        "quietgrad": _version(),
    }


def check_start(
    name: str,
    weights: str,
    accepted: str,
    needs_protection: bool,
    adapters: tuple[Record, ...] = (),
) -> tuple[Record, ...]:
    """Refuses to start from an output of an earlier run, unless that is asked for.

    Args:
        name, weights: ``model.name`` and ``model.weights``.
        accepted: ``model.accept_start``: the worst kind that may be.
        needs_protection: whether this run is private and its data were not declared public.
        adapters: of adapters that the model has (``records_of_adapters``).

    Returns:
        The records of the outputs that the run starts from.

    Raises:
        ValueError: naming the output, what is wrong with it and the remedy.
    """
    found = []
    begins = [
        (f"{setting}={value!r}", read_provenance(Path(value)) if value else None)
        for setting, value in (
            ("model.name", name.removeprefix("image:")),
            ("model.weights", weights),
        )
    ]
    for place, record in (*begins, *(("model has adapters", one) for one in adapters)):
        if record is None:
            continue
        found.append(record)
        kinds = starts_of(record)
        allowed = {WITHOUT_PRIVACY: set(STARTS), EPSILONS_ADD: {EPSILONS_ADD}}.get(accepted, set())
        if not needs_protection or kinds <= allowed:
            continue
        if WITHOUT_PRIVACY in kinds:
            what, kind = (
                "a run without privacy, so they hold its records, which no epsilon covers",
                WITHOUT_PRIVACY,
            )
        else:
            what, kind = (
                "a private run, whose epsilon adds to this one's for every record that both use",
                EPSILONS_ADD,
            )
        raise ValueError(
            f"{place}: these weights are from {what}; start from a public model, or, "
            "where that run's records are no part of these data or its cost is accepted, set "
            f'model.accept_start = "{kind}"'
        )
    return tuple(found)


def read_provenance(place: Path) -> Record | None:
    """The record kept with a file or folder of weights; None for what this library did not make, or
    made of public data.

    Raises:
        ValueError: for a record that cannot be read.
    """
    try:
        if not place.exists():
            return None
        folder = place if place.is_dir() else place.parent
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
        headers = [header for file in files if (header := _metadata(file)).get(KEY)]
        if headers:
            return _checked(json.loads(headers[0][KEY]))
        beside = folder / FILE
        described = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        return _checked(described[KEY]) if KEY in described else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(place)!r}: what it says of its training cannot be read "
            f"({type(error).__name__}), so it cannot be told from a run's output; use weights of "
            "known origin"
        ) from error


def records_of_adapters(model: Any) -> tuple[Record, ...]:
    """What PEFT's configurations of a model's adapters say of their training: PEFT keeps no path of
    where adapters were read.

    Raises:
        ValueError: for a record that is none.
    """
    configs = getattr(model, "peft_config", None)
    values = configs.values() if isinstance(configs, Mapping) else ()
    mappings = [getattr(config, "auto_mapping", None) for config in values]
    return tuple(_checked(m[KEY]) for m in mappings if isinstance(m, Mapping) and KEY in m)


def stamp_weights(folder: Path, record: Record, adapters: Iterable[str] = ()) -> None:
    """Writes the record into the header of every safetensors file of a folder, and into the
    configuration of adapters: the one free field that PEFT reads back, and writes again with them.

    Args:
        folder, record: where, and what.
        adapters: names of a model's adapters; all but "default" lie in a folder of their name.
    """
    for place in (folder, *(folder / name for name in adapters)):
        for file in sorted(place.glob("*.safetensors")):
            write_metadata(file, {KEY: json.dumps(record)})
        settings = place / ADAPTERS
        if settings.is_file():
            config = json.loads(settings.read_text(encoding="utf-8"))
            config["auto_mapping"] = {**(config.get("auto_mapping") or {}), KEY: record}
            write_whole(settings, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def write_metadata(file: Path, added: Mapping[str, str]) -> None:
    """Adds entries to a safetensors file's header; the tensors stay as they are. Whole or not at
    all.
    """
    header, begin = _header(file)
    header["__metadata__"] = {**header.get("__metadata__", {}), **added}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = file.with_suffix(".tmp")
    with open(file, "rb") as old, open(temporary, "wb") as new:
        new.write(len(text).to_bytes(8, "little") + text)
        old.seek(begin)
        while block := old.read(1 << 24):
            new.write(block)
    os.replace(temporary, file)


def _version() -> str:
    try:
        return importlib.metadata.version("quietgrad")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _checked(record: Any) -> Record:
    if not isinstance(record, dict) or not isinstance(record.get("private"), bool):
        raise ValueError("no record of a run")
    return record


def _metadata(file: Path) -> dict[str, str]:
    """Of a safetensors file; empty for anything else, which loading will name."""
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    try:
        found = _header(file)[0].get("__metadata__", {})
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and where the tensors begin: eight bytes of length,
    then the header.
    """
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("not a safetensors file")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file")
    return header, 8 + length
