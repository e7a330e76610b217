"""Whose interface this is."""

__version__ = "1.6.0"

__all__ = ["__version__"]
