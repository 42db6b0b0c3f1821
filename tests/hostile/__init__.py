"""Hostile problems: random solves over the widest range, each compared with an independent answer (../oracle.c).

``python -m hostile --list`` (in tests/) lists the paths; `make hostile` runs them all. problem.py draws, trial.py calls
the library, ../judge.py compares with ../oracle.py.
"""
