"""Data parallelism: the model on every device, the step as on one.

A training step is one program, for the global batch. The calls of the model in it are spread over
the replicas, forward and backward (`replicated_call`); the rest (loss, metrics, the user's own
`train_step`, the optimizer's decisions) happens once, on the whole batch, which is why it is exact.
"""
