"""Pages and figures about privacy and runs."""
