"""The part of cupyx that mapuot uses, over SciPy."""
