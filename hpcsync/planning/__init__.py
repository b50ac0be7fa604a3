"""What workers are told to do next, worked out from what was measured: how many contributions, how many samples each.

Pure like the paradigms, which may use it: the standard library and NumPy, no clocks, no files, no communication.
`speed` predicts how fast a worker will be, `batches` divides a step's samples by it, `adaptive_k` chooses how many
contributions an update waits for, `local_steps` how many steps a worker makes between pushes and how much of a push it
sends, `commit_rate` how often workers push. Where layers are separated `groups` says who has which, `halves` what is
known of them, and `node_assignment` how many workers should have those above the cut. `numbers` says what counts as
one.
"""
