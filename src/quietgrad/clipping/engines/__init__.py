"""From one micro-batch to its share of the clipped sum: book-keeping, or one example at a time."""
