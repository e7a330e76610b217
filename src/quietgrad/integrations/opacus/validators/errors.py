"""What is wrong with a model, under Opacus' names."""


class UnsupportedError(ValueError):
    """Something that cannot be trained privately."""


class UnsupportedModuleError(UnsupportedError):
    """A model that cannot be trained privately as it is."""


class ShouldReplaceModuleError(UnsupportedModuleError):
    """A layer that ``ModuleValidator.fix`` may replace."""


class UnsupportableModuleError(UnsupportedModuleError):
    """For ``except`` clauses: what is raised of a layer that mixes records is another of these."""


class NotYetSupportedModuleError(UnsupportedModuleError):
    """For ``except`` clauses: every layer that does not mix records is supported."""


class IllegalModuleConfigurationError(UnsupportedModuleError):
    """A model that is not set up for training."""
