"""The part of cupyx.scipy that mapuot uses, over SciPy."""
