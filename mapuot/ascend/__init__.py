"""The loop of passes up to a certified one, and the corrections between passes."""
