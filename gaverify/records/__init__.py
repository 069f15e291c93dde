"""Frozen facts and answers that every room right of the passes reads: names and numbers, no tensors, no torch."""
