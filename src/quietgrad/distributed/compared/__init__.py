"""What ranks compare of the code that they run."""
