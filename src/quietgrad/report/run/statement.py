"""The privacy statement: what a run claims, about what, on which assumptions, in rows that a
reviewer can check and sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.events import RELATIONS, EventSequence, PrivacyEvent, unit_of
from quietgrad.report.run.facts import RunFacts
from quietgrad.report.words import in_words, what_stands_for_a_user

Row = tuple[str, str]
SEEDS = {
    "entropy": "drawn from the operating system's entropy, kept secret while the run goes on, and "
    "removed at its end; no file holds what noise or batches could be drawn again from",
    "seed": "a seed that the user gave: the claim holds only if it stays secret and starts one run",
    "public seed": "a seed that anybody may know, for records that were declared public: no "
    "protection",
}

# Models that nothing was learnt by before the run, unless weights are given.
AT_RANDOM = ("table:", "cnn:", "vgg:", "features:random")


def statement(facts: RunFacts) -> list[Row]:
    """(what, in words) of a private run; of any other one row that says that nothing is claimed."""
    if facts.said.not_private is not None:
        return [
            ("Claim", f"None: the run gave up its privacy ({facts.said.not_private}). No epsilon "
             "covers what was released, before or after.")
        ]  # fmt: skip
    if not facts.private:
        return [
            ("Claim", "None: this run had no privacy. Its weights and scores hold its records.")
        ]
    return list(_rows(facts))


def _rows(facts: RunFacts) -> Iterator[Row]:
    unit, header = unit_of(facts.neighbouring), facts.said.header
    yield "Claim", _claim(facts)
    if facts.data_declared_public:
        yield (
            "Declared public",
            (
                "The training records were declared to need no protection, so seeds may be known: "
                "the number above describes the mechanism and protects nobody."
            ),
        )
    if facts.event is not None:
        yield "What it means", f"Somebody {in_words(facts.event, facts.neighbouring)}."
    told = {**facts.result, **header, "neighbouring": facts.neighbouring}
    stands = what_stands_for_a_user(told)
    yield "Unit of privacy", f"One {unit} of the training data{stands}."
    yield "Neighbouring data sets", f"{RELATIONS[facts.neighbouring]}."
    rate = _events(facts)
    size = header.get("dataset_size", facts.result.get("records", {}).get("train"))
    if rate:
        yield (
            "Sampling",
            (
                f"Poisson: in each step every {unit} is drawn by itself, at rate "
                f"{_range([e['sample_rate'] for e in rate])}"
                + (f", from {size:,} {unit}s; their number is taken to be public." if size else ".")
            ),
        )
        yield "Clipping", _clipping(facts, rate, unit)
        yield "Noise", _noise(header, rate)
    for side in header.get("event", {}).get("beside", ()):
        name = side.get("name", "a number")
        yield f"Also released: {name}", "With noise of its own; part of the same epsilon."
    selection = facts.result.get("selection")
    if selection:
        yield (
            "Choice among runs",
            (
                f"The best of a random number of runs ({selection['distribution']}, "
                f"{selection['mean_runs']:g} on average), each with one of "
                f"{selection['candidates']} settings drawn at random: part of the epsilon."
            ),
        )
    yield "Delta", _delta(facts, size)
    yield (
        "Accountant",
        (
            "Privacy-loss distributions, composed numerically with every rounding upwards, in both "
            f"directions (add and remove); {_version(facts, 'quietgrad')}, on "
            f"{_version(facts, 'dp-accounting')}."
        ),
    )
    yield "Seed policy", _seeds(facts)
    yield "Tuned on what", _tuned(facts, bool(selection))
    for row in _assumptions(facts, unit):
        yield "Assumption", row
    for earlier in facts.start_warnings:
        yield "Start", f"{earlier}."
    if facts.ledger is not None:
        count = facts.ledger.complete
        yield (
            "Ledger",
            (
                f"{facts.said.releases} releases in {count.lines} lines, each on disk before its "
                f"noise was drawn. Fingerprint (last link of the chain of digests): {count.chain}"
            ),
        )
    packages = facts.environment.get("packages", {})
    if packages:
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        yield "Library versions", f"Python {facts.environment.get('python', '?')}, {versions}."


def _claim(facts: RunFacts) -> str:
    if facts.epsilon is None or facts.delta is None:
        return "None: the run does not say its delta."
    of = "" if facts.planned in (None, facts.steps) else f" of {facts.planned} planned"
    # Of an unfinished run it is what was spent so far.
    return (
        f"({round_up(facts.epsilon, 4)}, {round_up_to(facts.delta, 3)})-differential privacy, an "
        f"upper bound over all {facts.steps} releases{of}, counted from the ledger."
        if facts.ledger is not None
        else f"({round_up(facts.epsilon, 4)}, {round_up_to(facts.delta, 3)})-differential privacy, "
        "an upper bound over all runs and the choice of the best."
    )


def _events(facts: RunFacts) -> list[dict[str, Any]]:
    """The JSON of each stretch of like steps."""
    event: PrivacyEvent | None = facts.event
    if event is None:
        own = facts.said.header.get("event")
        return [own] if own else []
    parts = event.events if isinstance(event, EventSequence) else (event,)
    return [part.to_json() for part in parts]


def _clipping(facts: RunFacts, events: list[dict[str, Any]], unit: str) -> str:
    whose = "gradient"
    if unit == "user":
        combined = facts.said.header.get("combined", facts.result.get("combined"))
        whose = {"sum": "summed gradient", "mean": "mean gradient"}.get(str(combined), whose)
    bound = _length(facts)
    sketch = events[0].get("randomized_clipping")
    if sketch is None:
        how = "an upper bound of its length in the arithmetic that ran"
    else:
        how = (
            f"a length that is estimated at random (k = {sketch['sketch_dim']}): it may be too "
            f"short, and the accountant counts that ({sketch['envelope']} envelope)"
        )
    return f"Each {unit}'s {whose} is cut {bound}, by {how}."


def _length(facts: RunFacts) -> str:
    """What a gradient is cut to."""
    if facts.norms is None:
        return "to a length that no ledger says"
    least, most = facts.norms
    if facts.norm_adapts:
        return (
            f"to a length that is {least:g} in the first step and then follows the noisy count "
            "that is released beside the gradients"
        )
    if least != most:
        return f"to a length between {least:g} and {most:g} that was fixed for each step beforehand"
    return f"to length {least:g}"


def _noise(header: Any, events: list[dict[str, Any]]) -> str:
    bands = max(int(e.get("bands", 1)) for e in events)
    how = "independent in each step" if bands == 1 else f"correlated over {bands} steps"
    source = {"keyed": "a keyed generator (Philox)", "secure": "a cryptographic stream (AES-256)"}
    drawn = source.get(str(header.get("noise_source")), "")
    multiplier = _range([e["noise_multiplier"] for e in events], up=True)
    return (
        f"Gaussian, {how}, of multiplier {multiplier} "
        "(standard deviation over the clipping length)" + (f", from {drawn}." if drawn else ".")
    )


def _range(values: list[float], up: bool = False) -> str:
    least, most = min(values), max(values)

    def shown(value: float) -> str:
        return round_up(value, 4) if up else f"{value:.6g}"

    return shown(least) if least == most else f"{shown(least)} to {shown(most)}"


def _delta(facts: RunFacts, size: int | None) -> str:
    if facts.delta is None:
        return "Not said."
    text = f"{round_up_to(facts.delta, 3)}"
    if size:
        text += f", which is {facts.delta * size:.2g} of 1/N"
    return text + ": with that probability epsilon promises nothing."


def _seeds(facts: RunFacts) -> str:
    sources = {session.source for session in facts.said.sessions}
    if not sources:
        return "Not said by a ledger."
    starts = len(facts.said.sessions)
    text = "; ".join(SEEDS[source] for source in sorted(sources))
    return f"Sampling, noise and projections: {text}. {starts} start{'s' * (starts > 1)}."


def _tuned(facts: RunFacts, selected: bool) -> str:
    text = (
        "Validation and test records were declared public, and choices made by their scores are "
        "free. "
    )
    if selected:
        return text + "The choice among settings is part of the epsilon."
    return text + (
        "If settings were chosen by looking at other runs on the same training records, those "
        "runs' epsilons add to this one; this report cannot know of them. Runs tried before: "
        "______"
    )


def _assumptions(facts: RunFacts, unit: str) -> Iterator[str]:
    yield (
        f"An attacker may see every release, every model in between and this page, and know all "
        f"other {unit}s; not the seeds, and not this machine's memory."
    )
    yield "Validation and test records need no protection: their scores have no noise."
    yield (
        f"Training data were read once a {unit}, as the configuration says; copies of a {unit} "
        "count as others."
    )
    name = str(facts.setting("model", "name", ""))
    if name and (facts.setting("model", "weights") or not name.startswith(AT_RANDOM)):
        yield (
            f"The base model did not learn from the training {unit}s; if it did, no epsilon here "
            "covers that."
        )


def _version(facts: RunFacts, package: str) -> str:
    version = facts.environment.get("packages", {}).get(package)
    return f"{package} {version}" if version else package
