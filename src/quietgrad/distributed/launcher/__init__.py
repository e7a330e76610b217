"""What torchrun's agents, one a machine, tell the processes that they started."""
