"""This rank's GPU, claimed before MPI starts; or why there is none."""

from __future__ import annotations

from hpcsync import gpus

FOUND = gpus.found()
DEVICE = gpus.claim("cpu" if FOUND.why else "cuda")
