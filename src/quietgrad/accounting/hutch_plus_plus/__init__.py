"""What is proved of the ratio R of Hutch++: exponential moments, and the law that stands for it in
the accountant (docs/hutchpp_envelope.md).
"""
