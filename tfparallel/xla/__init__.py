"""Compiles a traced step into as few XLA programs per device as its exchanges allow."""
