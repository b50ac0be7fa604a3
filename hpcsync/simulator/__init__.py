"""Discrete-event simulation of training runs in virtual time."""
