"""Summaries and comparisons of traces."""
