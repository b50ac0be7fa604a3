"""Training without communication: gradients, updates, samplers and speed models."""
