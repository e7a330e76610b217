"""Private training through other libraries' own trainers and engines; nothing is imported here."""
