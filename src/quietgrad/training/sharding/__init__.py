"""A run whose processes hold a shard of every parameter each (``training.sharded``): its model, and
what of it is saved.
"""
