"""Functions that users call: their arguments become a problem, which is solved and warned of."""
