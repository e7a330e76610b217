"""What other libraries write on the screen of records that they are given: lengths, which are
private.
"""

from __future__ import annotations

import logging
import re

# Logger of transformers -> how its lines are told that hold the length of a text or of a
# micro-batch.
_PADDED = ("automatically padded from", "is not possible if sequence_length")
LINES = {
    "transformers.tokenization_utils_base": ("longer than the specified maximum sequence length",)
} | {
    f"transformers.models.{name}.modeling_{name}": _PADDED
    for name in ("big_bird", "bigbird_pegasus", "led", "longformer")
}


def say_no_lengths() -> None:
    """From now on, in this process, such lines hold no numbers."""
    for name in LINES:
        logging.getLogger(name).addFilter(_without_numbers)  # once: it is the same filter


def _without_numbers(line: logging.LogRecord) -> bool:
    text = line.getMessage()
    if any(words in text for words in LINES.get(line.name, ())):
        line.msg, line.args = re.sub(r"\d+", "...", text), ()
    return True
