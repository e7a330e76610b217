"""Helpers under the names that Opacus gives them."""
