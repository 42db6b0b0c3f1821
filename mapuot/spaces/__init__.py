"""Gromov-Wasserstein: distances within spaces, costs and objective of a step, steps, and where to start."""
