"""What a model or a loss keeps of the records that it meets, in plain Python: seen before anything
private is clipped.
"""
