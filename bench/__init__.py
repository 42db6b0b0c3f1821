"""The benchmark of mapuot: ``python -m bench NAME`` measures one part and writes JSON and PNG to bench/results."""
