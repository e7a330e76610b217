"""The best of a random number of runs: what choosing costs."""
