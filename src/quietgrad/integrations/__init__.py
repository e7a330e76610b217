"""Private training through other libraries' own trainers and engines, a folder each; nothing is
imported here.
"""
