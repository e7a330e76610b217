"""Sums of many products, of bounded rounding, the same bits in any company."""
