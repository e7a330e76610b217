"""What ``privacy=`` may be at the doors of other libraries: a configuration, which is built for the
training data, or a plan that was built for them, also one that was extended (docs/schedules.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quietgrad.integrations.owners import Owners
from quietgrad.plan import PrivacyConfig, PrivacyPlan
from quietgrad.sampling.identities import identities_of


def plan_for(privacy: Any, dataset: Any, owners: Owners) -> PrivacyPlan:
    """The plan that trains on a data set.

    Args:
        privacy: a ``PrivacyConfig``, or a ``PrivacyPlan`` that was built for these records.
        dataset: as it is trained on; its length is public.
        owners: whose the records are.

    Raises:
        TypeError: for anything else.
        ValueError: for a plan of another number of records, or with other owners; what
            ``PrivacyConfig.build`` refuses. No message says anything of a record.
    """
    if isinstance(privacy, PrivacyConfig):
        return privacy.build(len(dataset), record_owner=owners.of_records)
    if not isinstance(privacy, PrivacyPlan):
        raise TypeError(
            f"privacy is of type {type(privacy).__name__}, neither a configuration nor a plan; "
            "give PrivacyConfig(target_epsilon=..., ...), or what its build(...) made"
        )
    users = privacy.sampler.users
    if users is None:
        if owners.of_records is not None:
            raise ValueError(
                "record_owner with a plan that protects single records; build it with "
                "PrivacyConfig.build(..., record_owner=...)"
            )
        if privacy.dataset_size != len(dataset):
            raise ValueError(
                f"privacy is a plan for {privacy.dataset_size} records, and train_dataset has "
                f"{len(dataset)}; build it for these, PrivacyConfig.build({len(dataset)})"
            )
        return privacy
    if owners.of_records is None:
        raise ValueError(
            "privacy is a plan that protects users, and nothing says here whose a record is; give "
            "record_owner= as the plan was built with"
        )
    known = identities_of(owners.of_records)
    each = np.repeat(np.arange(users.count), np.diff(users.offsets))
    planned = dict(zip(users.order.tolist(), each.tolist(), strict=True))
    same = len(known) == len(dataset) == len(planned) and all(
        users.identities[planned[i]] == owner for i, owner in enumerate(known)
    )
    if not same:
        raise ValueError(
            "privacy is a plan that was built with other owners than record_owner; build it with "
            "these"
        )
    return privacy
