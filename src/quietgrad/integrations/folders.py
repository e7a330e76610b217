"""Folders that other libraries make before anything is looked at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from transformers import TrainingArguments

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def leaves_no_folder(construct: Constructor) -> Constructor:
    """A Trainer's ``__init__`` that, where it raises, leaves no empty ``args.output_dir`` behind:
    transformers makes it first.
    """

    @functools.wraps(construct)
    def constructed(*given: Any, **options: Any) -> None:
        named = (one for one in (*given, *options.values()) if isinstance(one, TrainingArguments))
        args = next(named, None)
        place = None if args is None or not args.output_dir else Path(args.output_dir)
        made = [] if place is None else [p for p in (place, *place.parents) if not p.exists()]
        before = set() if args is not None else set(Path().iterdir())
        try:
            construct(*given, **options)
        except BaseException:
            if args is None:  # transformers, or TRL, chose a folder beside the script's others
                args = getattr(given[0] if given else None, "args", None)
                place = None if args is None else Path(args.output_dir)
                beside = place is not None and len(place.parts) == 1 and place not in before
                made = [place] if place is not None and beside else []
            if args is not None and args.should_save:  # the process that made it
                remove_empty(made)
            raise

    return constructed  # type: ignore[return-value]


def remove_empty(folders: list[Path]) -> None:
    """Folders, innermost first, up to the first that holds something, or is none."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
