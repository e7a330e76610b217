"""TRL's SFTTrainer with private steps: instruction tuning, a record's loss the mean over its own
learnt tokens.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
from datasets import Dataset
from trl import SFTTrainer

from quietgrad.distributed.groups.news import telling
from quietgrad.integrations.folders import leaves_no_folder
from quietgrad.integrations.transformers.losses import IGNORED
from quietgrad.integrations.transformers.trainer import PrivateTrainer
from quietgrad.loading.unsaid import say_no_lengths

# Columns of which a record is read; beside them, the one that args.dataset_text_field names.
READ = (("messages",), ("prompt", "completion"), ("conversations",), ("input_ids",))
READ_TEXTS = {"prompt", "completion", "chosen", "rejected"}  # and the one of dataset_text_field
QUOTES = "sequence: "  # where SFTTrainer's warning begins to quote a record


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    """``trl.SFTTrainer`` that trains privately; arguments as its own, and ``PrivateTrainer``'s
    ``privacy`` and ``per_example_loss``.

    A record is one row: packing is refused. Every record counts towards N, also one that
    ``max_length`` cuts off before its answer: it contributes zero, where SFTTrainer leaves it out,
    and so would change N. How records are told apart (prompt and completion, conversations) follows
    from the columns of the first.

    Raises:
        ValueError, TypeError: as ``PrivateTrainer``; for a mixture of experts with a router loss,
            which is a mean over the batch.
    """

    @telling
    @leaves_no_folder
    def __init__(self, *args: Any, **options: Any) -> None:
        for place, name in ((3, "train_dataset"), (4, "eval_dataset")):
            if place < len(args):  # as TRL takes them
                args = (*args[:place], table_of(args[place], name), *args[place + 1 :])
            elif name in options:
                options[name] = table_of(options[name], name)
        owned = options.get("record_owner") is not None
        with no_records_in_warnings(SFTTrainer.__module__, owned):
            super().__init__(*args, **options)
        if self.aux_loss_enabled:
            raise ValueError(
                "the router's auxiliary loss is a mean over the batch; set router_aux_loss_coef=0.0"
            )

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """SFTTrainer's drops the records that are cut off before their answer, and so N would
        depend on what is in them; here they stay. And it puts them in another order where it is
        asked to: Poisson batches have none, and ``record_owner`` says whose a record is by it.
        """
        if formatting_func is None:
            require_columns(dataset, dataset_name, [*READ, (args.dataset_text_field,)])
        if dataset_name != "train":
            return super()._prepare_dataset(
                dataset, processing_class, args, packing, formatting_func, dataset_name
            )
        whole = copy.copy(args)
        whole.max_length, whole.shuffle_dataset = None, False
        filled = without_gaps(dataset, args.dataset_text_field)
        prepared = super()._prepare_dataset(
            filled, processing_class, whole, packing, formatting_func, dataset_name
        )
        most = args.max_length
        if most is None or args.truncation_mode == "keep_start":
            kept = slice(None, most)
        elif args.truncation_mode == "keep_end":
            kept = slice(-most, None)
        else:
            raise ValueError(
                f"args.truncation_mode={args.truncation_mode!r} is none that TRL knows; use "
                '"keep_start" or "keep_end"'
            )
        return prepared.map(
            _cut,
            fn_kwargs={"kept": kept, "padding": self._tokenizer.pad_token_id},
            desc=f"Truncating {dataset_name} dataset",
        )

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Without the number of training tokens, which SFTTrainer shows beside evaluations."""
        self._metrics["train"].clear()
        self._metrics["eval"].pop("num_tokens", None)
        super().log(logs, *args, **options)


def table_of(given: Any, name: str) -> Any:
    """A list of dictionaries as a Hugging Face data set, which is what TRL's trainers read; all
    else as it is.

    Args:
        given: data set, or a dictionary of several.
        name: of the argument.

    Raises:
        TypeError, ValueError: for lists that make no table, with the remedy and without a record.
    """
    if isinstance(given, dict):
        return {key: table_of(one, f"{name}[{key!r}]") for key, one in given.items()}
    if not isinstance(given, list | tuple):
        return given
    if not given or not all(isinstance(record, dict) for record in given):
        raise TypeError(
            f"{name} is a {type(given).__name__} without records, or of other things than "
            "dictionaries; give one dictionary of columns a record, or a datasets.Dataset"
        )
    if any(record.keys() != given[0].keys() for record in given):
        raise ValueError(
            f"{name} is a list of dictionaries with different keys, of which a table takes the "
            "first record's, so that one record would decide what all others hold; give every "
            "record the same keys, with None where it has none"
        )
    try:
        return Dataset.from_list(list(given))
    except Exception:  # which quotes a record
        raise ValueError(
            f"{name} is a list whose records make no table: a column holds values of different "
            "types; give each column one type, or a datasets.Dataset"
        ) from None


def require_columns(dataset: Any, name: str, kinds: Sequence[tuple[str, ...]]) -> None:
    """TRL's own error is the name of a column that it looked for last.

    Raises:
        ValueError: where the data set has none of the kinds of columns that can be read.
    """
    columns = list(getattr(dataset, "column_names", None) or ())
    if columns and not any(set(kind) <= set(columns) for kind in kinds):
        wanted = "; or ".join(" and ".join(map(repr, kind)) for kind in kinds)
        raise ValueError(
            f"{name}_dataset has the columns {', '.join(map(repr, columns))}, and none that can be "
            f"read: {wanted}; rename a column, name it in the arguments, or pass a formatting_func "
            "where the trainer takes one"
        )


def without_gaps(dataset: Any, field: str | None = None) -> Any:
    """A table whose texts are all there, an empty one where there was none: TRL's trainers end with
    an error at the first that is missing, and a bar that says where.
    """
    features = getattr(dataset, "features", None) or {}
    kinds = {name: getattr(kind, "dtype", None) for name, kind in features.items()}
    texts = [
        name
        for name in kinds
        if name in (*READ_TEXTS, field) and kinds[name] in ("string", "large_string")
    ]
    if not texts or not isinstance(dataset, Dataset):
        return dataset
    return dataset.map(_filled, fn_kwargs={"texts": texts}, desc="Reading train dataset")


def _filled(record: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    return {name: record[name] or "" for name in texts}


def _cut(record: dict[str, Any], kept: slice, padding: int) -> dict[str, Any]:
    """A record without a word gets one of padding, which is not learnt: TRL's collator would make
    its type, that of no numbers, the type of all that stand beside it.
    """
    if not record["input_ids"]:
        return {"input_ids": [padding], "labels": [IGNORED]}
    return {name: record[name][kept] for name in ("input_ids", "labels")}


@contextlib.contextmanager
def no_records_in_warnings(module: str, owned: bool) -> Iterator[None]:
    """TRL's trainers warn of prompts that are tokenised otherwise alone, and quote one; tokenizers
    of a text that is too long, and say how long. And bars of data sets count records.

    Args:
        module: of the trainer.
        owned: whether users are protected, so that the number of their records is private.
    """

    def without(line: logging.LogRecord) -> bool:
        text = line.getMessage()
        if "tokenized prompt is not a prefix" in text:
            line.msg, line.args = text.partition(QUOTES)[0] + "(not shown: it is private)", ()
        return True

    say_no_lengths()
    logger = logging.getLogger(module)
    logger.addFilter(without)
    with_bars = owned and not datasets.are_progress_bars_disabled()
    if with_bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.removeFilter(without)
        if with_bars:
            datasets.enable_progress_bars()
