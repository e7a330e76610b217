"""Who used which parameter, with what gradient: hooks, the backward pass that they see, and the
fallback of modules without a rule.
"""
