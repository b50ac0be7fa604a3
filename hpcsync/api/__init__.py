"""Public interface of a training script."""
