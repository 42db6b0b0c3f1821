"""Which way a call takes."""
