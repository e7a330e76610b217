"""Epsilon by Renyi divergences, for scripts that are compared with Opacus' own."""
