"""What is made of spikes that stand out of the noise: one rule a file, and their Protocols."""
