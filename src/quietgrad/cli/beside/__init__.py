"""Commands beside a run: what is in a file before it, which runs there are, what leaves it."""
