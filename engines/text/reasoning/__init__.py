"""Thoughts in a model's own words, told from its answer: one line a family."""
