"""Hostile problems: random solves over the widest range, each compared with an independent answer (newton.c).

``python -m hostile --list`` (in tests/) lists the paths; `make hostile` runs them all. problem.py draws, newton.py
knows the answer, trial.py calls the library, judge.py compares, shrink.py makes a failing case small.
"""
