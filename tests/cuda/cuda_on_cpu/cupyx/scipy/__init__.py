"""What mapuot takes of cupyx.scipy, over SciPy."""
