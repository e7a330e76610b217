"""What somebody who waits sees: stages, steps, and that something long still lasts."""
