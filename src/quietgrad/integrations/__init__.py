"""Other libraries' ways of training, run by Quietgrad: a folder each."""
