"""What ``--extend-steps``, ``--extend-epochs`` and ``--extend-to-epsilon`` ask for."""

from __future__ import annotations

Extension = tuple[int | None, float | None, float | None]


def require_one_length(extend: Extension) -> None:
    """Refuses an extension that is no length, before a file is read.

    Args:
        extend: more steps, more epochs, and a new target; None for what was not given.

    Raises:
        ValueError: for one in steps and in epochs, and one of nothing.
    """
    steps, epochs, _ = extend
    if steps is not None and epochs is not None:
        raise ValueError(
            f"--extend-steps={steps} and --extend-epochs={epochs:g} are both given, and each "
            "decides the other; give one"
        )
    for option, value in (("--extend-steps", steps), ("--extend-epochs", epochs)):
        if value is not None and not value > 0:
            raise ValueError(f"{option}={value:g} must be positive; pass a number above 0")
