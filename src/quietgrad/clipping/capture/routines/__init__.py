"""Fused routines that use weights without calling a layer (LSTM, GRU, RNN, attention, bags of
words), answered under capture by the same computation made of captured linear maps.

A routine is one function of one file, and one line of ``opening``.
"""
