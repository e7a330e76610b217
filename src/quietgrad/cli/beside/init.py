"""``quietgrad init``: a configuration to begin with, for a file of records."""

from __future__ import annotations

import shlex
from pathlib import Path

from quietgrad.cli.output import console, fail, one_line, print_json
from quietgrad.training.sources.guess import Guess, guess
from quietgrad.training.sources.inspection import (
    Inspection,
    read_for_owner,
    with_labels,
    with_owners,
)
from quietgrad.training.sources.pictures import between_labels, is_picture_folder
from quietgrad.training.sources.proposal import propose, propose_images
from quietgrad.training.sources.rows import NO_NAMES, Rows

WHAT = {
    "text": "a classifier of texts",
    "table": "a classifier of rows",
    "answers": "a language model that learns to answer",
    "images": "a classifier of images",
}


@one_line
def run_init(
    source: Path,
    output: Path,
    text: str,
    label: str,
    user: str,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """See ``quietgrad init --help``."""
    if output.exists():
        fail(f"--output={str(output)!r} is there already; name another file, or remove it", 2)
    if output.suffix.lower() != ".toml":
        fail(f"--output={str(output)!r} must end in .toml: the configuration is a TOML file", 2)
    if not output.absolute().parent.is_dir():
        fail(f"--output={str(output)!r}: no such folder; make it, or name another place", 2)
    said = {"--text": text, "--label": label, "--user": user}
    named = [word for pair in said.items() if pair[1] for word in pair]
    command = shlex.join(
        ["quietgrad", "init", str(source), *named, *(["--skip-bad"] if skip_bad else [])]
    )
    if source.is_dir():
        if user:
            raise ValueError(
                f"--user={user!r}: a folder of images names no owners, so each image is protected "
                "by itself; leave --user out"
            )
        task, written, learnt = "images", _of_folder(source, command, text, label), ""
    else:
        guessed, written = _of_file(source, command, text, label, user, skip_bad)
        task, learnt = guessed.task, _learnt(guessed)
    with open(output, "x", encoding="utf-8") as file:
        try:
            file.write(written)
            file.flush()
        except OSError:  # a part of it, or nothing, is a configuration of something else
            output.unlink()
            raise
    go_on = shlex.quote(str(output))
    if as_json:
        print_json({"config": str(output), "task": task})
        return
    console(False).print(
        f"{output}: {WHAT[task]}{learnt}. Read it, then: quietgrad plan {go_on}, "
        f"quietgrad train {go_on}",
        soft_wrap=True,
        markup=False,
    )


def _of_folder(source: Path, command: str, text: str, label: str) -> str:
    if not is_picture_folder(source):
        raise ValueError(
            f"FILE={str(source)!r} is a folder without train/ or train.csv; name a file, or a "
            "folder of images (train/CLASS/*.png and test/CLASS/*.png)"
        )
    if not any((source / name).exists() for name in ("test", "val", "test.csv", "val.csv")):
        raise ValueError(
            f"FILE={str(source)!r} has no test part: add test.csv, or a folder test or val beside "
            "train"
        )
    label = label or "label"
    between = between_labels(source, label)
    return propose_images(str(source), command, text or "file", label, between)


def _of_file(
    source: Path, command: str, text: str, label: str, user: str, skip_bad: bool
) -> tuple[Guess, str]:
    look = f"`quietgrad check {shlex.quote(str(source))}`"
    found, rows = read_for_owner(source)
    if rows is None:
        where = f"; see {look}" if "(" in found.failure else ""
        raise ValueError(f"FILE={str(source)!r}: {found.failure.split(' (')[0]}{where}")
    if found.broken and not found.records:  # of nothing that can be read, nothing is guessed
        raise ValueError(f"FILE={str(source)!r}: no row of it can be read; {look} lists why")
    guessed = guess(found.columns, text, label, str(source), user)
    texts = [n for n in (guessed.text, guessed.pair) if n and guessed.task == "text"]
    found = with_labels(found, rows, texts, [guessed.label], guessed.task != "answers", 1.0)
    if found.unfit:
        if found.unfit == NO_NAMES:
            raise ValueError(f"FILE={str(source)!r}: {NO_NAMES}")
        # The other reasons hold labels, or how many there are.
        named = shlex.join(["quietgrad", "check", str(source), "--label", guessed.label])
        raise ValueError(
            f"FILE={str(source)!r}: what is in column {guessed.label!r} is no class to learn: it "
            f"is always the same, or numbers, names or lists; `{named}` says which"
        )
    if found.refused and not skip_bad:
        raise ValueError(
            f"FILE={str(source)!r} has rows that are broken, or lack a text or a label; {look} "
            "lists them: mend them, or add --skip-bad, which leaves them out"
        )
    users = _users(found, rows, user, skip_bad) if user else 0
    usable = found.records - len(found.gaps)
    usual = "tab" if source.suffix.lower() == ".tsv" else "comma"
    other = "" if found.separator in ("", usual) else found.separator
    return guessed, propose(str(source), usable, guessed, command, skip_bad, other, user, users)


def _learnt(guessed: Guess) -> str:
    """What is learnt from what: a guess, to be seen before the file is opened."""
    read = [repr(name) for name in (guessed.text, guessed.pair) if name]
    return f", which learns {guessed.label!r} from {' and '.join(read) or 'the other columns'}"


def _users(found: Inspection, rows: Rows, user: str, skip_bad: bool) -> int:
    """How many people the rows are of; what training would refuse of the owners is refused."""
    found = with_owners(found, rows, user)
    left_out = {row.first for row in found.gaps} if skip_bad else set()
    if found.unfit:
        raise ValueError(f"--user={user!r}: {found.unfit}")
    if any(row.first not in left_out for row in found.ownerless):
        raise ValueError(
            f"--user={user!r}: there are rows without an owner, which nothing would protect; "
            f"`quietgrad check {shlex.quote(found.path)} --user {shlex.quote(user)}` lists them: "
            "fill in whose they are, or take them out"
        )
    return found.users
