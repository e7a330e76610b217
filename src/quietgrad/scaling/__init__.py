"""A plan for many devices before any is paid for: what a private step holds, sends and takes on
each, for a model by its shape (docs/many_devices.md). Trains nothing, and makes no weights.
"""
