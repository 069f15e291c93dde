"""Gives the accumulated run the data of the full-batch run: its loaders' samples, and the draws of its loop.

A first audit watches. Where its runs did not see the same samples, or drew numbers outside the model's forwards, the
runs are made again: the full-batch run keeps what its loaders gave and what its loop drew, and the others are given the
rows of the same samples.
"""
