"""Rank 0's records of a run: trace, evaluations, checkpoints and straggler reports."""
