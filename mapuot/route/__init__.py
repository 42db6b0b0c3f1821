"""Routes: which way a call takes."""
