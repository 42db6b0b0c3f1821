"""Warnings and errors of mapuot. Bad arguments raise plain ValueError or TypeError that name the argument."""


class ConvergenceWarning(UserWarning):
    """The solver stopped before the certified error reached the tolerance; the text says how far it came."""


class InfeasibleError(ValueError):
    """No plan satisfies the constraints, for example a balanced point whose every pair is forbidden."""
