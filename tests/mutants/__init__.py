"""Changes of one rule at a time, and whether a test notices: table.py lists them, ``make mutants`` tries them all."""
