"""A micro-batch of a model's shape, run by the code that clips without a number being computed:
what it would hold, multiply and exchange.
"""
