"""Ways to take norms of per-example gradients: one file each, with its cost and its bounds."""
