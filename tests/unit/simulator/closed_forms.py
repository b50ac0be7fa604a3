"""Closed forms of what a simulation takes."""


def ring_allreduce_s(n_hosts: int, size_bytes: float, latency_s: float, bandwidth: float) -> float:
    """Return the duration of a ring all-reduce between equal hosts that divide the size evenly, in seconds."""
    return 2 * (n_hosts - 1) * (latency_s + size_bytes / n_hosts / bandwidth)
