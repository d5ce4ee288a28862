"""A traced step as few XLA programs on each device as its exchanges allow."""
