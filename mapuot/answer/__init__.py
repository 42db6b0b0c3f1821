"""What comes back: numbers, products and derivatives of a plan, and answers in files."""
