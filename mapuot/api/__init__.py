"""What users call: signatures and docstrings, the problem made, solved and warned of."""
