"""The version, in one place that imports nothing heavy."""

__version__ = "0.1.0"
