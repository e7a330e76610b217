"""What the columns of a file look like, and what could be learnt from them: guesses for
``quietgrad init`` and ``quietgrad check``, which the owner of the file reads.
"""

from __future__ import annotations

import difflib
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from quietgrad.checks import nearest
from quietgrad.training.sources.numerals import Commas, are_dates, number_of
from quietgrad.training.sources.pictures import PICTURES
from quietgrad.training.sources.rows import Rows

Kind = Literal["text", "classes", "numbers", "dates", "words", "empty"]
MOST_CLASSES = 50
# More labels than these are measurements: numbers with fractions (fewer may be half stars), whole
# ones that are not counted as classes are.
MOST_FRACTIONS = 10
MOST_NUMBERS = 20
TEXT_WORDS = 4.0  # words a cell, on average
SENTENCE = 3  # words of a name that may be no name of a column
NEARLY = 0.8  # how alike a name is to what was typed, which then says it already
LABELS = ("label", "labels", "class", "target", "category", "sentiment", "stars", "rating", "y")
TEXTS = ("text", "review", "tweet", "sentence", "comment", "message", "body", "content", "abstract")
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text_a", "text_b"),
)
PROMPTS = ("question", "prompt", "instruction", "input", "document", "article", "dialogue")
ANSWERS = ("answer", "response", "completion", "output", "summary", "highlights")


@dataclass(frozen=True)
class Column:
    """What is in a column.

    Attributes:
        name: of the column.
        kind: "text" (several words), "classes" (words or whole numbers that repeat), "numbers",
            "dates" (in figures), "words" (anything else), "empty".
        distinct: different cells that are not empty.
        filled: cells that are not empty.
        words: of a cell, on average.
        like_a_cell: whether its name looks like a cell (``looks_like_a_cell``).
        whole: whether every cell that is filled is a whole number.
    """

    name: str
    kind: Kind
    distinct: int
    filled: int
    words: float
    like_a_cell: bool = False
    whole: bool = False

    @property
    def told(self) -> str:
        """``kind`` for a reader. A table's inputs are numbers wherever they can be read as such, a
        label of them classes.
        """
        return "numbers or classes" if self.kind == "classes" and self.whole else self.kind


@dataclass(frozen=True)
class Guess:
    """What could be learnt.

    Attributes:
        task: "text", "answers" or "table".
        text, pair, label: columns; of answers, ``text`` is the question and ``label`` the answer.
    """

    task: Literal["text", "answers", "table"]
    label: str
    text: str = ""
    pair: str = ""


def describe(rows: Rows) -> dict[str, Column]:
    """Column name -> what is in it."""
    return {name: _column(name, cells) for name, cells in rows.columns.items()}


def guess(
    columns: Mapping[str, Column],
    text: str = "",
    label: str = "",
    path: str = "",
    user: str = "",
) -> Guess:
    """What could be learnt from columns like these.

    Args:
        columns: from ``describe``.
        text, label: columns that are known ("": to be guessed).
        path: of the file, for messages.
        user: column of the rows' owners, of which nothing is learnt.

    Raises:
        ValueError: for a column that is not there, or where nothing looks like a label.
    """
    usual = _usual(columns)
    for option, name in (("--text", text), ("--label", label), ("--user", user)):
        if name and name not in columns:
            raise ValueError(
                f"{option}={name!r} is not a column of {path!r}"
                f"{nearest_told(name, _like_cells(usual), _look(path))}"
            )
        if name and name == user and option != "--user":
            raise ValueError(
                f"--user={user!r} is {option}, too: nothing is learnt of whose a row is; name the "
                "column that tells people apart"
            )
    known = {name: columns[name] for name in (text, label) if name}
    columns = {name: one for name, one in {**usual, **known}.items() if name != user}
    texts = [text] if text else [n for n in _best(columns, "text", TEXTS) if n != label]
    lower = {name.lower(): name for name in columns}
    asked = next((lower[n] for n in PROMPTS if n in lower), "")
    answer = next((lower[n] for n in ANSWERS if n in lower), "")
    if (
        not text
        and not label
        and asked
        and answer
        and columns[answer].kind in ("text", "words", "dates")
    ):
        return Guess("answers", answer, asked)
    labels = [label] if label else [n for n in _best(columns, "classes", LABELS) if n not in texts]
    labels = labels or [lower[n] for n in LABELS if n in lower and lower[n] not in texts]
    if not labels:
        raise ValueError(
            f"FILE={path!r}: no column looks like a label (words or whole numbers that repeat); "
            "name it with --label; "
            + (
                f"`{_look(path)}` shows its columns"
                if any(_like_cells(columns).values())
                else f"its columns are {', '.join(columns)}"
            )
        )
    if label and not text and columns[label].kind == "text":
        if not (others := [n for n in texts if n != label]):
            raise ValueError(f"--label={label!r} holds texts, and no other column has any to learn "
                             "from; name one with --text")  # fmt: skip
        return Guess("answers", label, others[0])
    for first, second in PAIRS:
        if not text and first in lower and second in lower:
            return Guess("text", labels[0], lower[first], lower[second])
    if texts:
        return Guess("text", labels[0], texts[0])
    if len(columns) < 2:
        raise ValueError(
            f"FILE={path!r} has a single column for labels, and none to learn from; add one"
        )
    return Guess("table", labels[0])


def _usual(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Those that half of all records fill. A key that single JSON records have alone is as private
    as what they hold: it is in no message and no configuration.
    """
    most = max((column.filled for column in columns.values()), default=0)
    return {name: column for name, column in columns.items() if 2 * column.filled >= most}


def looks_like_a_cell(name: str, cells: Sequence[Any]) -> bool:
    """Whether a column's name may be a record's: a number, a sentence, a file of a picture, or what
    the column holds. Then the file may have no line of names, and its first record is as private as
    any other.
    """
    return (
        number_of(name) is not None
        or len(name.split()) >= SENTENCE
        or PurePath(name).suffix.lower() in PICTURES
        or any(isinstance(cell, str) and cell == name for cell in cells)
    )


def nearest_told(word: str, names: Mapping[str, bool], look: str) -> str:
    """As ``nearest``, where some names may be a record's cells: then none is listed.

    Args:
        word: that is none of them.
        names: of columns -> whether it looks like a cell.
        look: a command that shows them to the owner of the file.
    """
    if not any(names.values()):
        return nearest(word, names)
    known = [name for name, like_a_cell in names.items() if not like_a_cell]
    if close := difflib.get_close_matches(word, known, n=1, cutoff=NEARLY):
        return f"; did you mean {close[0]!r}?"
    return f"; names of its columns look like cells of a record, and `{look}` alone shows them"


def _like_cells(columns: Mapping[str, Column]) -> dict[str, bool]:
    return {name: column.like_a_cell for name, column in columns.items()}


def _look(path: str) -> str:
    return f"quietgrad check {shlex.quote(path)}"


def names_are_a_record(columns: Mapping[str, Sequence[Any]], label: str) -> bool:
    """Whether a file seems to begin with a record in place of the names of its columns: the label's
    name is a label, and another name is what its column holds (a number, a text, one of its words).
    A column "spam" of "spam" and "ham" alone says nothing.
    """
    if label not in counted(columns[label]):
        return False
    for name, cells in columns.items():
        kind = _column(name, cells).kind
        number = kind == "numbers" and number_of(name) is not None
        text = kind == "text" and len(name.split()) >= TEXT_WORDS
        if name != label and (number or text or name in counted(cells)):
            return True
    return False


def _best(columns: Mapping[str, Column], kind: Kind, names: Sequence[str]) -> list[str]:
    """Columns of a kind: those with a usual name first, then texts by length, classes from the
    last column.
    """
    found = [c for c in columns.values() if c.kind == kind]
    if kind == "text":
        found.sort(key=lambda c: -c.words)
    else:
        found.reverse()
    usual = [c for c in found if c.name.lower() in names]
    usual.sort(key=lambda c: names.index(c.name.lower()))
    return [c.name for c in [*usual, *(c for c in found if c not in usual)]]


def _column(name: str, cells: Sequence[Any]) -> Column:
    filled = [w for w in map(_word, cells) if w]
    like_a_cell = looks_like_a_cell(name, cells)
    if not filled:
        return Column(name, "empty", 0, 0, 0.0, like_a_cell)
    distinct = len(set(filled))
    words = sum(len(w.split()) for w in filled) / len(filled)
    with_commas = Commas.of(filled)
    read = with_commas.number_of if with_commas else number_of
    numbers = [n for n in map(read, filled) if n is not None]
    whole = len(numbers) == len(filled) and all(n.is_integer() for n in numbers)
    repeats = 2 <= distinct <= min(MOST_CLASSES, max(2, len(filled) // 3))
    kind: Kind = "words"
    if repeats and (whole or not numbers):
        kind = "classes"
    elif len(numbers) >= 0.98 * len(filled):
        kind = "numbers"
    elif are_dates(filled):
        kind = "dates"
    elif words >= TEXT_WORDS:
        kind = "text"
    return Column(name, kind, distinct, len(filled), words, like_a_cell, whole)


def _word(cell: Any) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    whole = isinstance(cell, float) and cell.is_integer()
    return str(int(cell) if whole else cell).strip()


def counted(cells: Sequence[Any]) -> Counter[str]:
    """Label -> records; "" counts the empty cells."""
    return Counter(map(_word, cells))


def measured(words: Sequence[str]) -> bool:
    """Whether labels are more whole numbers than classes usually have, and not as classes are
    counted: from 0 or 1 on, without gaps.
    """
    numbers = [number_of(word) for word in words]
    known = sorted(n for n in numbers if n is not None and n.is_integer())
    if len(known) < len(numbers) or len(known) <= MOST_NUMBERS:
        return False
    return known[0] not in (0, 1) or known[-1] - known[0] >= len(known)


def fractional(words: Sequence[str]) -> bool:
    """Whether labels are measurements: numbers, not all of them whole."""
    numbers = [number_of(word) for word in words]
    known = [n for n in numbers if n is not None]
    return len(known) == len(numbers) and any(not n.is_integer() for n in known)
