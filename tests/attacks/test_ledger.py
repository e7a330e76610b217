"""Attacks on the ledger of a run (findings 9, 11, 12 and 14): each is
tried, and where it makes sense its protection is switched off to see that the test would notice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attacks.ledgers import lines_of, made, plan_of, release
from quietgrad.events import PoissonGaussian
from quietgrad.ledger import read_ledger, reader
from quietgrad.ledger.chain import START, Count, CountWriter, count_path, create_count, encoded
from quietgrad.ledger.records import Mechanism, Release

DAMAGE: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a gap": (lambda x: [*x[:3], *x[4:]], "damaged at line 4: it says that it is line 5"),
    "a repeat": (lambda x: [*x[:4], x[3], *x[4:]], "damaged at line 5: it says that it is line 4"),
    "another order": (lambda x: [*x[:3], x[4], x[3], *x[5:]], "damaged at line 4"),
    "another sigma": (
        lambda x: [x[0].replace(b"1.1", b"9.9"), *x[1:]],
        "damaged at line 1: its digest",
    ),
    "another step": (
        lambda x: [*x[:3], x[3].replace(b'"step": 1', b'"step": 0'), *x[4:]],
        "damaged at line 4",
    ),
    "an empty line": (lambda x: [*x[:3], b"\n", *x[3:]], "damaged at line 4"),
    "another run's line": (
        lambda x: [*x[:3], encoded(4, Release(1), START)[0], *x[4:]],
        "damaged at line 4",
    ),
    "shortened by a line": (
        lambda x: x[:-1],
        "was shortened: it has 6 lines, and its count file says that it had 7",
    ),
    "shortened by many": (lambda x: x[:2], "was shortened"),
    "emptied": (lambda x: [], "was shortened"),
    "cut within a line": (lambda x: [*x[:-2], x[-2][:9]], "was shortened"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_ledger_is_refused_with_what_to_do(name: str, path: Path) -> None:
    # Before: lines lost in the middle or at the end undercounted, and a seeded resume drew their
    # noise again.
    change, message = DAMAGE[name]
    made(path)
    path.write_bytes(b"".join(change(lines_of(path))))
    before = path.read_bytes(), count_path(path).read_bytes()
    for attempt in (
        lambda: read_ledger(path),
        lambda: plan_of().start(path),
        lambda: plan_of().start(path, resume=True),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            attempt()
        assert "restore" in str(refused.value) and "\n" not in str(refused.value)
    assert (path.read_bytes(), count_path(path).read_bytes()) == before


def trusting(line: bytes, number: int, before: str) -> tuple[dict[str, object], str]:
    """Reads a line without a look at its number and digest."""
    fields = json.loads(line)
    return fields, fields["chain"]


def test_without_the_chain_an_edit_goes_unnoticed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path)
    path.write_bytes(
        path.read_bytes().replace(b'"noise_multiplier": 1.1', b'"noise_multiplier": 9.9')
    )
    with pytest.raises(ValueError, match="its digest"):
        read_ledger(path)
    monkeypatch.setattr(reader, "decoded", trusting)
    assert read_ledger(path).header["event"]["noise_multiplier"] == 9.9


@pytest.mark.parametrize("lost", [1, 3, 5])
def test_without_the_count_a_shortened_ledger_goes_unnoticed(
    lost: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path)
    kept = lines_of(path)[:-lost]
    path.write_bytes(b"".join(kept))
    with pytest.raises(ValueError, match="was shortened"):
        read_ledger(path)
    monkeypatch.setattr(
        reader,
        "read_count",
        lambda where: Count(len(kept), 5 - lost, json.loads(kept[-1])["chain"]),
    )
    assert read_ledger(path).releases == 5 - lost


def test_a_ledger_without_its_count_file_is_refused(path: Path) -> None:
    made(path)
    count_path(path).unlink()
    for attempt in (lambda: read_ledger(path), lambda: plan_of().start(path)):
        with pytest.raises(ValueError, match=r"lacks its count file 'ledger.jsonl.count'.*restore"):
            attempt()


@pytest.mark.parametrize("contents", [b"", b"no count", b" " * 512])
def test_a_damaged_count_file_is_refused(contents: bytes, path: Path) -> None:
    made(path)
    count_path(path).write_bytes(contents)
    with pytest.raises(ValueError, match=r"count=.* is damaged"):
        read_ledger(path)


def test_a_count_of_another_run_or_moment_is_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    made(other, 5)
    made(path, 5)
    older = count_path(path).read_bytes()
    shutil.copy(count_path(other), count_path(path))
    with pytest.raises(ValueError, match="is not the one that its count file is of"):
        read_ledger(path)
    count_path(path).write_bytes(older)
    made(path, 3)
    count_path(path).write_bytes(older)
    with pytest.raises(ValueError, match="not from the same moment"):
        read_ledger(path)


@pytest.mark.parametrize("left", [1, 9, -1])
def test_a_torn_line_hides_no_other_ledger(left: int, path: Path, tmp_path: Path) -> None:
    """The count file knows the digest of all lines but the last: a mutant took for that line what
    another run, of nine times the noise, would have written there.
    """
    made(path, 5)
    other = tmp_path / "other.jsonl"
    made(other, 5, noise_multiplier=9.9)
    *whole, last = lines_of(other)
    path.write_bytes(b"".join(whole) + last[:left])
    before = path.read_bytes()
    for attempt in (lambda: read_ledger(path), lambda: plan_of(noise_multiplier=9.9).start(path)):
        with pytest.raises(ValueError, match="was shortened"):
            attempt()
    assert path.read_bytes() == before


def test_a_ledger_that_grows_while_it_is_read_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, looks = reader.read_count, []
    with plan_of().start(path) as run:
        release(run)

        def slow(where: Path) -> Count | None:
            found = right(where)
            looks.append(found)
            if len(looks) == 1:  # between the first look at the count and the ledger
                release(run)
                release(run)
            return found

        monkeypatch.setattr(reader, "read_count", slow)
        assert read_ledger(path).releases == 3


def test_who_rewrites_both_files_is_not_noticed(path: Path) -> None:
    # Digests are no secret: the model is an accident, not malice (docs/privacy/files.md).
    made(path)
    event = PoissonGaussian(9.9, 0.1, 1)
    digest, whole, lines = START, b"", 0
    for record in [Mechanism(event, {"delta": 1e-5}), Release(0)]:
        lines += 1
        line, digest = encoded(lines, record, digest)
        whole += line
    path.write_bytes(whole)
    create_count(count_path(path))
    counting = CountWriter(count_path(path))
    counting.write(Count(lines, 1, digest))
    counting.close()
    assert read_ledger(path).releases == 1
