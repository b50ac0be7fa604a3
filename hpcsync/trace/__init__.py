"""The trace: an HDF5 file with every decision, transfer and time of a run."""
