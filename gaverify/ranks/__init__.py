"""Processes on this machine that are ranks under torch's DDP or `fully_shard`: started, joined, and what they send."""
