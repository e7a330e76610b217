"""Tests of the accounting room. A package, so that its file names may repeat
those of other rooms.
"""
