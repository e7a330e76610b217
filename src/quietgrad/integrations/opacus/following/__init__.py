"""What a loop computes is followed, and computed again for every record alone."""
