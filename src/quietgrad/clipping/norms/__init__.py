"""What a per-example gradient looks like in factored form, and how long it is: factors, rules,
estimators of norms and their certified bounds.
"""
