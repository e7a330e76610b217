"""Records to generate from: a prompt and the answer that is learnt, both made from a record's
columns by templates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietgrad.training.tasks.columns import (
    label_word,
    missing,
    no_column,
    owners_in,
    read_columns,
    without_gaps,
)
from quietgrad.training.tasks.predictions import read_new
from quietgrad.training.tasks.records import ByLength, padded
from quietgrad.training.tasks.splits import IGNORED, Splits


@dataclass(frozen=True)
class TextPairs:
    """Prompts and answers.

    Attributes:
        texts: [n] prompts.
        answers: [n]; "" where a record has none: nothing is learnt from it.
        source: where they came from.
        owners: [n] what each record's user is known by; None where nobody asks.
    """

    texts: tuple[str, ...]
    answers: tuple[str, ...]
    source: str
    label_names: tuple[str, ...] = ()
    owners: tuple[bytes, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def record_ids(self) -> tuple[bytes, ...]:
        """[n] what identifies each record: prompt and answer."""
        return tuple(
            hashlib.sha256("\0".join(pair).encode("utf-8", "surrogatepass")).digest()
            for pair in zip(self.texts, self.answers, strict=True)
        )

    def subset(self, indices: NDArray[np.int64]) -> TextPairs:
        return TextPairs(
            tuple(self.texts[i] for i in indices),
            tuple(self.answers[i] for i in indices),
            self.source,
            self.label_names,
            None if self.owners is None else tuple(self.owners[i] for i in indices),
        )


def load_pairs(
    source: str,
    prompt: str,
    answer: str,
    user: str = "",
    skip_bad: bool = False,
    option: str = "data.source",
) -> TextPairs:
    """Reads records and fills the templates.

    Args:
        source: a CSV, TSV, JSONL, JSON or Parquet file, or a Hugging Face data set.
        prompt, answer: templates with column names in braces, such as "{text} Summary:".
        user: column that says whose a record is, where users are protected.
        skip_bad: leave out rows that cannot be read, or have an empty prompt or answer.
        option: what named the source, for messages.

    Raises:
        ValueError: for a column that is not there, or a template without one.
    """
    columns = read_columns(source, skip_bad)
    filled: dict[str, Sequence[Any]] = {
        name: _filled(name, template, columns, source)
        for name, template in (("prompt", prompt), ("answer", answer))
    }
    owners = owners_in(columns, user, option, source)
    filled |= {} if owners is None else {"owner": owners}
    filled = without_gaps(filled, ["prompt", "answer"], skip_bad)
    if not filled["prompt"]:
        raise ValueError(f"data.source={source!r} holds no records")
    answers = tuple(text if text.strip() else "" for text in filled["answer"])
    kept = None if owners is None else tuple(filled["owner"])
    return TextPairs(tuple(filled["prompt"]), answers, source, owners=kept)


def load_prompts(file: Path, prompt: str) -> tuple[TextPairs, dict[str, list[Any]]]:
    """New records without answers, and their columns.

    Raises:
        ValueError: for a file that cannot be read, or lacks a column of the template.
    """
    fields = [field for _, field, _, _ in Formatter().parse(prompt) if field is not None]
    columns = read_new(file, dict.fromkeys(fields, "task.prompt"))
    prompts = tuple(_filled("prompt", prompt, columns, str(file)))
    return TextPairs(prompts, ("",) * len(prompts), str(file)), columns


def require_answers(splits: Splits[TextPairs]) -> None:
    """Checks that every validation and test record has an answer. A training record without one
    stays, says nothing of itself, and contributes nothing.

    Raises:
        ValueError: otherwise, or where no training record has an answer.
    """
    source = splits.train.source
    if not all(splits.validation.answers) or not all(splits.test.answers):
        raise ValueError(
            f"data.source={source!r}: a validation or test record has an empty answer; remove such "
            "records"
        )
    if not any(splits.train.answers):
        raise ValueError(
            f"data.source={source!r}: no training record has an answer; check task.answer"
        )


def _filled(name: str, template: str, columns: dict[str, list[Any]], source: str) -> list[str]:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"task.{name}={template!r} is no template: {error}; write a brace itself as {{{{ or "
            f"}}}}"
        ) from error
    fields = [field for _, field, _, _ in parts if field is not None]
    if not fields:
        raise ValueError(
            f"task.{name}={template!r} names no column; write one in braces, such as {{text}}"
        )
    for _, field, form, conversion in parts:
        if field is not None and field not in columns:
            raise ValueError(
                f"task.{name}={template!r}: {field!r} is not a column of "
                f"{source!r}{no_column(field, columns)}"
            )
        if form or conversion:
            raise ValueError(
                f"task.{name}={template!r}: write {{{field}}} alone; values are taken as they stand"
            )
    filled = []
    for row in range(len(columns[fields[0]])):
        pieces = []
        for literal, field, _, _ in parts:
            value = None if field is None else columns[field][row]
            gap = field is not None and missing(value)
            if gap and name == "answer":
                pieces = [""]  # an answer that lacks a part is none
                break
            pieces.append(literal + ("" if field is None or gap else label_word(value)))
        filled.append("".join(pieces))
    return filled


@dataclass(frozen=True)
class TokenisedPairs(ByLength):
    """Token ids of prompt and answer together, unpadded.

    Attributes:
        ids: [n] rows of token ids.
        starts: [n] where the answer begins in each row.
        pad_id: of padding.
        end_id: closes every answer; None where the tokenizer has no such token.
        answers: [n] as texts.
    """

    ids: tuple[NDArray[np.int64], ...]
    starts: NDArray[np.int64]
    pad_id: int
    end_id: int | None
    answers: tuple[str, ...]

    @property
    def labels(self) -> NDArray[Any]:
        """[n] lengths of the answers in tokens: there are no classes."""
        return np.array([len(row) for row in self.ids], dtype=np.int64) - self.starts

    def subset(self, indices: NDArray[np.int64]) -> TokenisedPairs:
        chosen = tuple(self.ids[i] for i in indices)
        return TokenisedPairs(
            chosen,
            self.starts[indices],
            self.pad_id,
            self.end_id,
            tuple(self.answers[i] for i in indices),
        )

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
        """input_ids, attention_mask and labels [examples, longest]; labels are the answer's tokens,
        elsewhere ``IGNORED``.
        """
        rows = [self.ids[i] for i in indices]
        learnt = [
            np.where(np.arange(len(row)) < start, IGNORED, row)
            for row, start in zip(rows, self.starts[indices], strict=True)
        ]
        # Never shorter than two tokens: an empty batch has to have a next token too.
        return {
            "input_ids": padded(rows, self.pad_id, 2).to(device),
            "attention_mask": padded([np.ones_like(row) for row in rows], 0, 2).to(device),
            "labels": padded(learnt, IGNORED, 2).to(device),
        }


def tokenise_pairs(
    pairs: TextPairs, tokenizer: Any, max_length: int, max_answer_length: int
) -> TokenisedPairs:
    """Tokenises prompts and answers apart, so that the boundary is a token's; an answer keeps its
    beginning, and the prompt what room is left, its end kept.

    Raises:
        ValueError: if the answer may take all of the length.
    """
    if max_answer_length >= max_length:
        raise ValueError(
            f"task.max_answer_length={max_answer_length} leaves no room for a prompt in "
            f"model.max_length={max_length}; choose a smaller one"
        )
    end = tokenizer.eos_token_id
    prompts = _ids(tokenizer, pairs.texts)
    answers = _ids(tokenizer, pairs.answers, special=False)
    rows, starts = [], []
    for prompt, answer, text in zip(prompts, answers, pairs.answers, strict=True):
        kept = (
            []
            if not text
            else answer[: max_answer_length - (end is not None)]
            + ([end] if end is not None else [])
        )
        room = max_length - len(kept)
        # The first token may be one that opens every text; what follows it is cut from the front.
        opening = prompt[:1] if len(prompt) > room else []
        before = opening + prompt[len(prompt) - room + len(opening) :] if opening else prompt
        before = before or [
            end if end is not None else 0
        ]  # the first token of an answer is predicted from something
        rows.append(np.asarray(before + kept, dtype=np.int64))
        starts.append(len(before))
    pad = tokenizer.pad_token_id
    return TokenisedPairs(
        tuple(rows),
        np.asarray(starts, dtype=np.int64),
        int(pad if pad is not None else end if end is not None else 0),
        end,
        pairs.answers,
    )


def _ids(tokenizer: Any, texts: Sequence[str], special: bool = True) -> list[list[int]]:
    found = tokenizer(
        list(texts),
        add_special_tokens=special,
        truncation=False,
        padding=False,
        verbose=False,  # else it says how long the first is that is too long
    )["input_ids"]
    return [list(row) for row in found]
