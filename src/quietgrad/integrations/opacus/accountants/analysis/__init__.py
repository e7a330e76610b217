"""Renyi divergences under Opacus' name for their place, for scripts that account by hand."""
