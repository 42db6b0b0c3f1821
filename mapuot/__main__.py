"""``python -m mapuot``: the command line, as ``mapuot`` runs it."""

from .cli import main

main()
