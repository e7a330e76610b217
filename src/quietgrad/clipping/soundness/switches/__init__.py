"""What records change for good in what model and loss can reach, between two looks of the guard."""
