"""Independent checks of traces."""
