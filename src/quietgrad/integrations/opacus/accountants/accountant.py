"""What was released so far, and its epsilon by Quietgrad's accountant, or for "rdp" by Renyi
divergences, as Opacus has it.

Releases on one and the same batch share its coins: they are one step of the Gaussian mechanism
whose noise is as small as all of theirs together, 1 / sigma^2 = sum_j 1 / sigma_j^2 (adaptive
composition of Gaussian mechanisms given the batch; amplification then acts on the whole). Batches
are drawn independently and compose as phases.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from quietgrad.accounting import epsilon, noise_multiplier, renyi_epsilon
from quietgrad.accounting.calibrate import calibrate
from quietgrad.accounting.renyi.epsilon import RENYI_ORDERS
from quietgrad.checks import SettingsWarning, default_delta, require_delta_for, require_positive
from quietgrad.events import ADD_REMOVE, EventSequence, PoissonGaussian, PrivacyEvent
from quietgrad.plan.session.trained import (
    NEW_MODEL,
    Trained,
    earlier_runs,
    is_private,
    largest_of,
    note_copies,
    note_trained,
)

MECHANISMS = ("prv", "rdp", "gdp")
_OF_THIS_PROCESS: dict[str, QuietgradAccountant] = {}  # by name, for checkpoints
_STEADY = 1 - 2.0**-40  # rounding of 1 / sigma^2 may not make noise larger than it was


@dataclass
class OpenedBatch:
    """The releases made on one batch.

    Attributes:
        sample_rate: q.
        noise: noise multipliers.
    """

    sample_rate: float
    noise: list[float] = field(default_factory=list)

    @property
    def noise_multiplier(self) -> float:
        """Of one release that tells as much as all of them."""
        if len(self.noise) == 1:
            return self.noise[0]
        return _STEADY / math.sqrt(sum(sigma**-2 for sigma in self.noise))


class QuietgradAccountant:
    """Counts releases and composes them.

    Args:
        mechanism: the name that the script gave. "rdp" has an epsilon of its own, which is larger.

    Raises:
        ValueError: for a name that Opacus does not have.
    """

    def __init__(self, mechanism: str = "prv") -> None:
        if mechanism not in MECHANISMS:
            raise ValueError(
                f"accountant={mechanism!r} is unknown; use one of {', '.join(MECHANISMS)}"
            )
        self._mechanism = mechanism
        self._closed: Counter[tuple[float, float]] = Counter()
        self._open: list[OpenedBatch] = []
        self._records = 1  # of the largest data set; 1 as long as none is known
        self._others: list[QuietgradAccountant] = []  # whose checkpoints were loaded
        self._name = secrets.token_hex(8)
        _OF_THIS_PROCESS[self._name] = self
        self._trained = Trained(self._name, self._facts)

    def counts_for(self, dataset_size: int) -> None:
        """Of how many records batches are drawn. From then on epsilon is told for a delta below one
        over their number alone: a mechanism that publishes a record would have epsilon 0 above it.
        """
        self._records = max(self._records, dataset_size)

    def starts_from(self, module: Any) -> None:
        """Before a model is trained: what another engine of this process released on it is counted
        here too, as scripts make an engine anew where a cell is run again; any other run is said.
        """
        found = earlier_runs(module, self._trained)
        self._trained.started_from += found
        # Of an engine whose checkpoint was loaded all is counted already.
        others = [one for one in found if is_private(one) and not self._counts(one)]
        if not others:
            return
        names = [one.run for one in others if isinstance(one, Trained)]
        engines = [_OF_THIS_PROCESS[name] for name in names if name in _OF_THIS_PROCESS]
        self._others += engines
        what = (
            "another PrivacyEngine of this process, whose releases are counted here too"
            if len(engines) == len(others)
            else "another private run of this process, and epsilon is this engine's alone: for "
            "records that both use the epsilons and deltas add"
        )
        warnings.warn(
            f"the model was trained by {what}; {NEW_MODEL}, or go on with the first one",
            SettingsWarning,
            stacklevel=4,
        )

    def _counts(self, run: Any) -> bool:
        engine = _OF_THIS_PROCESS.get(run.run) if isinstance(run, Trained) else None
        return any(other is engine for other in self._others)

    def noted(self, module: Any) -> None:
        """After a release, before the optimiser's step: the model's weights are from here."""
        self._trained.releases += 1
        note_trained(module, self._trained)
        note_copies(largest_of(module))

    def _facts(self, releases: int) -> dict[str, Any]:
        delta = default_delta(self._records)
        spent = self.get_epsilon(delta)
        return {"epsilon": spent, "delta": delta, "steps": releases, "neighbouring": ADD_REMOVE}

    def open(self, sample_rate: float) -> OpenedBatch:
        """A batch that was drawn anew; what is released on it is noted there."""
        batch = OpenedBatch(sample_rate)
        self._open.append(batch)
        return batch

    def close(self, batch: OpenedBatch) -> None:
        """Nothing more is released on the batch."""
        self._open = [b for b in self._open if b is not batch]
        if batch.noise:
            self._closed[batch.noise_multiplier, batch.sample_rate] += 1

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sampling rate, steps) of all batches that something was released on;
        public.
        """
        return [(sigma, q, steps) for (sigma, q), steps in self._counted(set()).items()]

    def _counted(self, seen: set[int]) -> Counter[tuple[float, float]]:
        """With what those counted whose checkpoints were loaded, each once, also after that."""
        seen.add(id(self))
        total = Counter(self._closed)
        for batch in self._open:
            if batch.noise:
                total[batch.noise_multiplier, batch.sample_rate] += 1
        for other in self._others:
            if id(other) not in seen:
                total += other._counted(seen)
        return total

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """An upper bound of epsilon for all releases so far; 0 before the first.

        Args:
            delta: below 0.1, and below one over the number of records where batches were drawn.
            options: of Opacus' accountants: ``alphas`` for "rdp"; others are accepted.

        Raises:
            ValueError: for another delta.
        """
        return self.get_privacy_spent(delta=delta, **options)[0]

    def get_privacy_spent(self, delta: float, **options: Any) -> tuple[float, float]:
        """(epsilon, the best Renyi order): nan for the order with "prv" and "gdp", which have none.

        Args:
            delta, options: as ``get_epsilon``'s.
        """
        require_delta_for("delta", delta, self._records)
        phases = tuple(PoissonGaussian(sigma, q, steps) for sigma, q, steps in self.history)
        if not phases:
            return 0.0, math.nan
        event = phases[0] if len(phases) == 1 else EventSequence(phases)
        return self._spent(event, delta, options)

    def noise_for(
        self, target_epsilon: float, target_delta: float, sample_rate: float, steps: int
    ) -> float:
        """The smallest noise multiplier with which so many steps stay within a budget, by this
        accountant's epsilon.
        """
        if self._mechanism != "rdp":
            return noise_multiplier(
                target_epsilon, target_delta, sample_rate=sample_rate, steps=steps
            )
        require_positive("target_epsilon", target_epsilon)
        return calibrate(
            lambda sigma: renyi_epsilon(PoissonGaussian(sigma, sample_rate, steps), target_delta)[
                0
            ],
            target_epsilon,
        )

    def _spent(
        self, event: PrivacyEvent, delta: float, options: dict[str, Any]
    ) -> tuple[float, float]:
        if self._mechanism != "rdp":
            return epsilon(event, delta), math.nan
        orders = options.get("alphas")
        return renyi_epsilon(event, delta, RENYI_ORDERS if orders is None else orders)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Any:
        """Refused: what ``make_private`` returned counts its own releases.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "get_optimizer_hook_fn: a hook counts what it is told, and releases are counted where "
            "they are made; let PrivacyEngine.make_private build model, optimiser and loader, and "
            "ask its get_epsilon"
        )

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """One release on a batch of its own, made elsewhere."""
        PoissonGaussian(noise_multiplier, sample_rate, 1)  # judges them
        self._closed[float(noise_multiplier), float(sample_rate)] += 1

    def mechanism(self) -> str:
        """The name that the script gave."""
        return self._mechanism

    def __len__(self) -> int:
        return len(self.history)

    def state_dict(self) -> dict[str, Any]:
        """History and name, in the form of Opacus' checkpoints."""
        return {"history": self.history, "mechanism": self._mechanism, "counted_by": self._name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adds what was released before. Of an accountant of this process all is known that it
        counted, after the checkpoint too, and is counted once.

        Raises:
            ValueError: without a history.
        """
        if "history" not in state_dict:
            raise ValueError(
                "the checkpoint holds no history of releases, so its epsilon is unknown; load one "
                "that save_checkpoint wrote"
            )
        told = Counter[tuple[float, float]]()
        for sigma, q, steps in state_dict["history"]:
            PoissonGaussian(sigma, q, steps)
            told[float(sigma), float(q)] += int(steps)
        known = _OF_THIS_PROCESS.get(state_dict.get("counted_by", ""))
        if known is not None:
            counted = known._counted(set())
            if known is not self:
                self._others.append(known)
                if counted - told:
                    warnings.warn(
                        "releases were made after the checkpoint was saved, and are counted too",
                        SettingsWarning,
                        stacklevel=3,
                    )
            told -= counted  # nothing, unless the file says otherwise
        elif self.history:
            warnings.warn(
                "releases were made before the checkpoint was loaded; they are added to its own",
                SettingsWarning,
                stacklevel=3,
            )
        self._closed += told


def create_accountant(mechanism: str) -> QuietgradAccountant:
    """Quietgrad's accountant under a name of Opacus'."""
    return QuietgradAccountant(mechanism)


class RDPAccountant(QuietgradAccountant):
    """Epsilon by Renyi divergences: Opacus' number, an upper bound that is looser than "prv"."""

    def __init__(self) -> None:
        super().__init__("rdp")


class PRVAccountant(QuietgradAccountant):
    """Quietgrad's accountant under the name "prv"."""

    def __init__(self) -> None:
        super().__init__("prv")


class GaussianAccountant(QuietgradAccountant):
    """Quietgrad's accountant under the name "gdp"."""

    def __init__(self) -> None:
        super().__init__("gdp")


IAccountant = QuietgradAccountant
