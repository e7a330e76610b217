"""Runs whose ranks share records, and hold a part of every layer each."""
