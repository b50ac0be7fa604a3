"""Workloads: models with their data and evaluation."""
