"""Which layers mix records, and what stands for them."""

from quietgrad.integrations.opacus.validators.errors import UnsupportedModuleError
from quietgrad.integrations.opacus.validators.module_validator import ModuleValidator
from quietgrad.integrations.opacus.validators.utils import (
    register_module_fixer,
    register_module_validator,
)

__all__ = [
    "ModuleValidator",
    "UnsupportedModuleError",
    "register_module_fixer",
    "register_module_validator",
]
