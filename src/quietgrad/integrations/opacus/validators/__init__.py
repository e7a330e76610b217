"""Which layers mix records, and what stands for them."""

from quietgrad.integrations.opacus.validators.module_validator import (
    ModuleValidator,
    UnsupportedModuleError,
)

__all__ = ["ModuleValidator", "UnsupportedModuleError"]
