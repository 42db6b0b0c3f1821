"""Passes until one is certified, and what is done between them."""
