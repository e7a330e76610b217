"""One frozen configuration to sampler, clipper, noise and privacy event, cross-checked: the only
room that knows all of them.
"""

from quietgrad.plan.config import PrivacyConfig
from quietgrad.plan.plan import PrivacyPlan
from quietgrad.plan.run import PrivateRun
from quietgrad.sampling.users import Users

__all__ = ["PrivacyConfig", "PrivacyPlan", "PrivateRun", "Users"]
