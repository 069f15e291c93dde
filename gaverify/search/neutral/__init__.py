"""Neutralises a suspect in both runs, and runs them again."""
