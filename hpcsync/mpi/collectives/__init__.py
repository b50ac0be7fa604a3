"""Collective operations: means of vectors over all ranks, and shared weights."""
