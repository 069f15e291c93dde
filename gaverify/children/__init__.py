"""Child processes and the folders that they write into: neither outlives gaverify, whatever ends it. No torch.

A child does not hang on gaverify but on a keeper (`keeper`), a small process of its own between the two. The keeper
ends the child and everything it started as soon as gaverify is gone, also after a SIGKILL, which gaverify cannot
answer.
"""
