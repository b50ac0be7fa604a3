"""Processes and files."""
