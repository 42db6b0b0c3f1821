"""What mapuot takes of cupyx, over SciPy."""
