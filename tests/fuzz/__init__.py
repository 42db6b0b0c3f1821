"""Arbitrary bytes as calls: ``core.c`` for the C interface, ``targets.py`` for files, checkpoints and arguments."""
