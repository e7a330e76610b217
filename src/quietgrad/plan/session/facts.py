"""What has to be the same on all ranks of a start, in digests."""

from __future__ import annotations

import re
from pathlib import Path

from quietgrad.distributed.alike import digest, versions
from quietgrad.plan.planned import Startable
from quietgrad.plan.seeds import key_of_seed

DIFFERS = {
    "versions": "install the same versions of torch, numpy, quietgrad and Python everywhere",
    "mechanism": "build the plan from the same settings on every rank",
    "sampling": "build the plan for the same records (ids, owners, number) on every rank",
    "seed": "give every rank the same seed, or none: the first rank then draws a root for all",
    "ranks": "give plan.start the same tensor_parallel on every rank",
    "files": "give ledger and keys on every rank or on none, and the same resume; the first rank "
    "alone writes them",
}


def settings_of(plan: Startable) -> dict[str, object]:
    """What somebody most often gives in another way on one rank, by the names it is given by. All
    are public, and told as they are; the mechanism beside them has everything.
    """
    return {
        "dataset_size": plan.dataset_size,
        "steps": plan.steps,
        "expected_batch_size": plan.expected_batch_size,
        "delta": plan.delta,
        "max_grad_norm": plan.max_grad_norm,
        "target_epsilon": plan.target_epsilon,
        "noise_multiplier": plan.noise.noise_multiplier,
    }


def facts_of(
    plan: Startable,
    ledger: str | Path | None,
    secret: Path | None,
    resume: bool | None,
    tensor_parallel: int,
    size: int,
) -> dict[str, str]:
    """Of this rank; see ``PrivacyPlan.start``. Of ``size`` ranks."""
    sampler, noise = plan.sampler, plan.noise
    users = sampler.users
    return {
        "versions": versions(),
        **{name: str(value) for name, value in settings_of(plan).items()},
        "mechanism": digest(
            plan.first_event.to_json(),
            plan.first_planned.to_json(),
            [(course.to_json(), target) for course, target in plan.extensions],
            plan.clipper,
            (noise.noise_multiplier, noise.memory, noise.source.name, noise.digest),
            (plan.delta, plan.dataset_size, plan.steps, plan.data_are_public),
            re.sub(r" at 0x[0-9a-f]+", "", repr(plan.denoising)),
        ),
        "sampling": digest(
            plan.sampling_facts(),
            (sampler.dataset_size, sampler.sample_rate, sampler.bands),
            "" if sampler.parts is None else sampler.parts.tobytes().hex(),
            "" if users is None else users.order.tobytes().hex() + users.offsets.tobytes().hex(),
            "" if users is None else b"".join(users.identities).hex(),
        ),
        "seed": "" if plan.seed is None else digest(key_of_seed(plan.seed).root.hex()),
        "files": digest(ledger is None, secret is None, resume),
        "ranks": digest(tensor_parallel, size),
    }


def require_alike(told: list[dict[str, str]]) -> None:
    """Raises RuntimeError on all ranks where they differ, with the remedy.

    Args:
        told: by rank, ``facts_of`` there.
    """
    for name in told[0]:
        for rank, facts in enumerate(told):
            if facts[name] != told[0][name]:
                both = "" if name in DIFFERS else f" ({told[0][name]} and {facts[name]})"
                of = "sampling" if name == "dataset_size" else "mechanism" if both else name
                raise RuntimeError(
                    f"ranks 0 and {rank} differ in {name}{both}, so they would not be one run: "
                    f"{DIFFERS[of]}"
                )
