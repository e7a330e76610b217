"""What must hold before anything is clipped: the guard of a (model, loss) pair, refusals, the slow
oracle.
"""
