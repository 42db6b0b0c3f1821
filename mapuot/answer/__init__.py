"""Answers: the numbers, products and derivatives of a plan, and answers in files."""
