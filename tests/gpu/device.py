"""This rank's GPU, claimed before MPI starts; or why there is none."""

from __future__ import annotations

from hpcsync.system import gpu_selection

FOUND = gpu_selection.found()
DEVICE = gpu_selection.claim("cpu" if FOUND.why else "cuda")
