"""Runs a user's training script with a large batch and with accumulation, and compares what reaches the optimizer."""
