"""Traces of forwards and backwards, and how those of the full batch and of micro-batches correspond."""
