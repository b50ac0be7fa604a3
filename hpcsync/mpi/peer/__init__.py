"""MPI runs without servers: every rank is a worker."""
