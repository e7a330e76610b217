"""What is wrong with a model, under Opacus' names."""


class UnsupportedError(ValueError):
    """Something that cannot be trained privately."""


class UnsupportedModuleError(UnsupportedError):
    """A model that cannot be trained privately as it is."""


class ShouldReplaceModuleError(UnsupportedModuleError):
    """A layer that ``ModuleValidator.fix`` may replace."""


class IllegalModuleConfigurationError(UnsupportedModuleError):
    """A model that is not set up for training."""
