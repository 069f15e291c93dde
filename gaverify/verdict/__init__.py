"""Measures the difference of two gradients and decides what it means."""
