"""The task files that `tfparallel init` writes: with a sample of data, or for a user's own file."""
