"""Paradigms on a harder problem: a transformer that learns real text, with momentum and decaying rates.

The other reproductions learn digits, on which staleness costs little. All settings here are guesses.
"""

from __future__ import annotations

from reproductions.headline import METHODS, Problem

SAMPLES = 24_000  # sequences of 32 characters; a seventh of the text

ASHL = {"name": "ashl", "steps_coarse": 8, "warmup": 2, "profiled": 8, "loss_preset": 2.4}
PROBLEM = Problem(
    name="text",
    methods={**METHODS, "ASHL": (ASHL, None)},
    workload={"name": "text", "batch_size": 8, "context": 32, "layers": 2, "width": 64, "heads": 4},
    optimizer={"name": "sgd", "lr": 0.2, "momentum": 0.9},
    samples=SAMPLES,
    decays=(SAMPLES // 2, 3 * SAMPLES // 4),
    losses=(2.5, 2.4, 2.3),
    evaluations=40,
    factors=(0.125, 0.25, 0.5, 1.0),
    further=4,
    pairs=(("DSSP", "SSP"), ("DSSP", "ASP"), ("BSP + batches", "ASP"), ("gossip", "ASP")),
)
