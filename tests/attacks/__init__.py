"""What a hostile review tried, and what happens now (docs/attacks.md). A package, so that its files
may have the names of others.
"""
