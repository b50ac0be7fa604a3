"""Parts of a run that the simulator, real ranks and audits share: decisions, batches, device speeds, sessions."""
