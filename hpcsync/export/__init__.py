"""Exports of traces to the formats of other tools."""
