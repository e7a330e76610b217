"""A configuration to begin with for a file of records. Rate, batch and steps are left to the rule
of docs/defaults.md.

It holds names of columns and the number of records, which are public, and nothing of a record.
"""

from __future__ import annotations

import json
import math
import re

from quietgrad.checks import how_many
from quietgrad.training.sources.guess import Guess

FEWEST = 40
# A line with a comment behind its value, which may hold the mark of one.
COMMENTED = re.compile(r'((?:[^"#]|"(?:[^"\\]|\\.)*")+) # (.*)')
OWNER = '# user = "COLUMN"'
PER_USER = [
    "[users]",
    "records_per_user = 16 # most of a user's rows in a step; choose without counting any",
    'combined = "mean" # of their gradients; with "sum" many rows pull harder',
    'choice = "fixed" # the same rows in every step; "fresh": drawn anew',
    "",
]
EPSILON = {"text": 2.0, "table": 2.0, "answers": 3.0, "images": 3.0}


def propose(
    path: str,
    records: int,
    guess: Guess,
    command: str,
    skip_bad: bool = False,
    separator: str = "",
    user: str = "",
    users: int = 0,
) -> str:
    """A TOML file with comments.

    Args:
        path: of the file of records, as the configuration is to name it.
        records: that can be read.
        guess: what is learnt.
        command: what was typed.
        skip_bad: for ``data.skip_bad``.
        separator: what stands between columns, in a word, where it is not the usual one.
        user: column of the rows' owners, who are then what is protected; "" where there is none.
        users: how many there are.

    Raises:
        ValueError: for too few records, or users.
    """
    if user and users < FEWEST:
        raise ValueError(
            f"--user={user!r}: the rows are of {how_many(users, 'user')}; with fewer than {FEWEST} "
            "nothing can be learnt that is not one user's: add users"
        )
    if records < FEWEST:
        raise ValueError(
            f"FILE={path!r} has {how_many(records, 'record')}; with fewer than {FEWEST} nothing "
            "can be learnt privately: add records"
        )
    units = users or records
    share = 0.1 if units >= 2000 else 0.2
    train = round(units * (1 - 2 * share))
    lines = [
        f"# Written by `{_one_line(command)}`. To train: quietgrad train THIS_FILE",
        "# What it would cost first: quietgrad plan THIS_FILE. What a key means: quietgrad "
        "settings KEY.",
        "",
        *_model(guess),
        *_data(path, share, guess, skip_bad, separator, user),
        *(PER_USER if user else ()),
        *_privacy(guess.task, train, "users" if user else "records"),
        *_training(),
    ]
    return _aligned(lines)


def propose_images(
    folder: str, command: str, file: str = "file", label: str = "label", between: str = ""
) -> str:
    """The same for a folder of images, as the recipe for images has it; ``between`` the labels of
    an image, where it has several.
    """
    named = (file, label) != ("file", "label")
    lines = [
        f"# Written by `{_one_line(command)}`. To train: quietgrad train THIS_FILE",
        "",
        "[model]",
        'name = "features:random" # needs no download; better: "image:FOLDER" or "image:HUB/NAME"',
        'tune = "head" # the body runs once an image; "lora" and "full" cost more',
        "",
        "[data]",
        f"source = {_quoted(folder)}",
        *([f"text = {_quoted(file)}", f"label = {_quoted(label)}"] if named else []),
        *([f"label_separator = {_quoted(between)} # an image may have several"] if between else []),
        "image_size = 32 # pixels a side that images are brought to",
        "validation_fraction = 0.1 # of the training images; test images come with the folder",
        "",
        "[privacy]",
        f"target_epsilon = {EPSILON['images']} # the promise: smaller is stronger",
        "# target_delta: left out, 1 / N^1.1 for N training images",
        "",
        *_training(),
    ]
    return _aligned(lines)


def _model(guess: Guess) -> list[str]:
    if guess.task == "table":
        return [
            "[model]",
            'name = "table:mlp" # a small network; "table:linear" for few records',
            'tune = "full"',
            "",
        ]
    if guess.task == "answers":
        return [
            "[model]",
            'name = "packaged:smollm2" # any causal language model: a folder or a hub name',
            'tune = "lora"',
            "lora_rank = 16",
            'lora_targets = ["q_proj", "v_proj"]',
            "max_length = 256 # tokens kept of question and answer together",
            "",
            "[task]",
            'kind = "generate"',
            f"prompt = {_quoted(_field(guess.text) + chr(10))}",
            f"answer = {_quoted(_field(guess.label))}",
            "max_answer_length = 64",
            'decoded = "rougeL" # at the end the model also writes answers to test records',
            "",
        ]
    return [
        "[model]",
        'name = "packaged:minilm" # English; any encoder: a folder or a hub name',
        'tune = "head" # fast; "lora" or "full" learn more from many records',
        "max_length = 64 # tokens kept of a text",
        "",
    ]


def _data(
    path: str, share: float, guess: Guess, skip_bad: bool, separator: str, user: str
) -> list[str]:
    comment = f" # its columns are separated by a {separator}" if separator else ""
    lines = ["[data]", f"source = {_quoted(path)}{comment}"]
    if guess.task == "text":
        lines.append(f"text = {_quoted(guess.text)}")
    if guess.pair:
        lines.append(f"text_pair = {_quoted(guess.pair)}")
    if guess.task != "answers":
        lines.append(f"label = {_quoted(guess.label)}")
    return [
        *lines,
        f"validation_fraction = {share} # declared public: scores on them are printed",
        f"test_fraction = {share} # declared public",
        f"skip_bad = {str(skip_bad).lower()} # true leaves out rows broken or without a label",
        f"user = {_quoted(user)} # whose a row is: all rows of one are protected together"
        if user
        else f"{OWNER:<34}# whose a row is: people with several rows are protected whole",
        "",
    ]


def _privacy(task: str, train: int, unit: str) -> list[str]:
    return [
        "[privacy]",
        f"target_epsilon = {EPSILON[task]} # the promise: smaller is stronger",
        f"target_delta = {delta_for(train):g} # below 1 / (training {unit})",
        "",
    ]


def _training() -> list[str]:
    return [
        "[training]",
        "# Left out, and chosen from the number of records, epsilon and the hours: learning rate,",
        "# batch size and steps. quietgrad plan THIS_FILE says what they are, and why.",
        "hours = 2.0 # that training may take on this machine",
        "eval_every = 10 # steps between scores of validation records",
    ]


def delta_for(train: int) -> float:
    """The power of ten below 1 / N^1.1, at most 0.01."""
    return float(f"1e{min(-2, math.floor(-1.1 * math.log10(train)))}")


def _field(column: str) -> str:
    return "{" + column + "}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _aligned(lines: list[str]) -> str:
    """One file, comments behind keys one below the other."""
    found = []
    for line in lines:
        parts = COMMENTED.fullmatch(line)
        found.append(f"{parts[1].rstrip():<34}# {parts[2]}" if parts else line)
    return "\n".join(found) + "\n"


def _one_line(command: str) -> str:
    return " ".join(command.split())
