"""Clipping of models whose layers are cut over ranks (tensor parallel): every rank has all records
and a part of each layer, so that a record's squared norm is a sum over ranks.
"""
