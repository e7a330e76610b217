"""One private run on several processes, over ``torch.distributed``: the records of a batch are
shared out, their clipped sums are added up, and noise is drawn once (docs/many_processes.md).
"""
