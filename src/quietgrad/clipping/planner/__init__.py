"""What a model costs to clip, and the engine and micro-batch size that are chosen for it, with the
reasons.
"""
