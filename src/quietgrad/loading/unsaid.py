"""What other libraries write on the screen of records that they are given: lengths and numbers of
records, which are private.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

# Logger of transformers -> how its lines are told that hold the length of a text or of a
# micro-batch, or the size of a picture.
_PADDED = ("automatically padded from", "is not possible if sequence_length")
LINES = {
    "transformers.tokenization_utils_base": ("longer than the specified maximum sequence length",),
    "transformers.image_utils": ("Got image shape",),
    "transformers.models.musicgen_melody.modeling_musicgen_melody": ("signal is of length",),
} | {
    f"transformers.models.{name}.modeling_{name}": _PADDED
    for name in ("big_bird", "bigbird_pegasus", "led", "longformer", "reformer")
}


# How torch's warnings begin that hold the shape of a micro-batch: of losses whose targets have
# other dimensions (a constant for all records), and of tensors that out= is too small for; and
# Pillow's of a large picture. With another number each is another warning, and is shown anew.
WARNED = (
    r"Image size \(\d+ pixels\) exceeds limit",
    "Using a target size",
    "An output with one or more elements was resized",
)


# How torch's errors begin that hold the sizes of records which make no tensor together.
_SIZES = ("stack expects each tensor to be equal size", "expected sequence of length")


def collated(collate_fn: Callable[[list[Any]], Any], records: list[Any]) -> Any:
    """What a script makes of records; an error of torch's that says how long they are says it no
    more.

    Raises:
        ValueError: in its place, with the remedy.
    """
    try:
        return collate_fn(records)
    except (RuntimeError, ValueError) as error:
        said = f"{error} {error.__cause__} {error.__context__}"
        if not any(words in said for words in _SIZES):
            raise
    raise ValueError(  # not in the handler: the other one is not to be shown above it
        "records of one batch hold values of different sizes (not shown: they are private), and "
        "collate_fn makes one tensor of them; let it pad them (DataCollatorWithPadding, "
        "torch.nn.utils.rnn.pad_sequence), with a mask, or give all records one size"
    )


def say_no_sizes() -> None:
    """From now on, in this process, such warnings are not shown. (Where targets mix records, the
    guard says so.)
    """
    for text in WARNED:
        ours = ("ignore", re.compile(text, re.IGNORECASE), Warning, None, 0)
        if ours not in warnings.filters:  # else all that was shown once would be shown again
            warnings.filterwarnings("ignore", text)


def say_no_lengths() -> None:
    """From now on, in this process, such lines hold no numbers."""
    for name in LINES:
        logging.getLogger(name).addFilter(_without_numbers)  # once: it is the same filter


def _without_numbers(line: logging.LogRecord) -> bool:
    text = line.getMessage()
    if any(words in text for words in LINES.get(line.name, ())):
        line.msg, line.args = re.sub(r"\d+", "...", text), ()
    return True
