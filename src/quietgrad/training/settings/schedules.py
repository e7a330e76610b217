"""[schedules] of a configuration file: factors by step on noise, clipping norm and batch size, for
the whole run or phase by phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quietgrad.checks import listed
from quietgrad.records import Above0, judge
from quietgrad.schedules import Phase, Schedules
from quietgrad.schedules.phases import steps_of
from quietgrad.schedules.shapes import shape_from

Shape = Mapping[str, str | int | float | list[int | float]]
PhaseTable = Mapping[str, int | float | Shape]
FACTORS = ("noise", "clipping_norm", "batch_size")
PHASE_KEYS = ("steps", "epochs", *FACTORS)


@dataclass(frozen=True)
class SchedulesTable:
    """Settings that change from step to step, as factors: a number, or a shape such as
    ``{shape = "cosine", first = 1.0, last = 0.5}``. Shapes: constant (value); linear, cosine and
    exponential (first, last); step (factors, begins); list (factors).

    Attributes:
        noise: on the noise multiplier, given or found for privacy.target_epsilon.
        clipping_norm: on privacy.max_grad_norm; the noise goes with it.
        batch_size: on training.expected_batch_size.
        phases: parts of the run, each with steps or epochs and factors of its own, such as
            ``{steps = 100, noise = 2.0}``; in place of the keys above, training.steps and
            training.epochs.
    """

    noise: Above0 | Shape | None = None
    clipping_norm: Above0 | Shape | None = None
    batch_size: Above0 | Shape | None = None
    phases: list[PhaseTable] = field(default_factory=list)

    def __post_init__(self) -> None:
        judge(self)
        made = self.of_run, self.of_phases  # they judge shapes and keys
        if self.phases and made[0] != Schedules():
            given = next(name for name in FACTORS if getattr(self, name) is not None)
            raise ValueError(
                f"{given}={getattr(self, given)!r} with schedules.phases: a phase has its own; "
                f"leave schedules.{given} out"
            )

    @property
    def of_run(self) -> Schedules:
        """What ``PrivacyConfig.schedules`` is."""
        return Schedules(**_factors({name: getattr(self, name) for name in FACTORS}, ""))

    @property
    def of_phases(self) -> tuple[Phase, ...]:
        """What ``PrivacyConfig.phases`` is."""
        return tuple(_phase(given, f"phases[{i}]") for i, given in enumerate(self.phases))


def _phase(given: PhaseTable, where: str) -> Phase:
    for key in given:
        if key not in PHASE_KEYS:
            raise ValueError(
                f"{where}.{key}={given[key]!r} is no key of a phase, whose keys are "
                f"{listed(PHASE_KEYS, 'and')}"
            )
    steps, epochs = given.get("steps"), given.get("epochs")
    factors = _factors({name: given.get(name) for name in FACTORS}, f"{where}.")
    steps_of(steps, epochs, 1.0, 1.0, f"{where}.")  # type: ignore[arg-type]
    return Phase(**factors, steps=steps, epochs=epochs)  # type: ignore[arg-type]


def _factors(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {
        name: value if isinstance(value, int | float) else shape_from(where + name, value)
        for name, value in given.items()
        if value is not None
    }
