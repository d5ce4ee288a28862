"""Data parallelism: the model on every device, the step as on one.

A training step is one program, for the global batch. Its calls of the model are divided over the
replicas, forward and backward (`replicated_call`). The rest (loss, metrics, the user's own
`train_step`, the optimizer's decisions) runs once, on the whole batch, so the step is exact.
"""
