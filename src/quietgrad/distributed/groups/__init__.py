"""Process groups from without: what torchrun's agents tell of them, and how one that failed leaves
them.
"""
