"""Exports of traces, and of the scalars of runs, to other tools."""
