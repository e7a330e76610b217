"""Clipping of models whose parameters are sharded by ``fully_shard``: passes that all ranks make
together, and sums that are scattered layer by layer.
"""
