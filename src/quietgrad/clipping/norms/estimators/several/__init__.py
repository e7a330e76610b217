"""Norms of several parameters at once: what is few numbers of each waits, and is made for all."""
