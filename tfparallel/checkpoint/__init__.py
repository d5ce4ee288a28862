"""Checkpoints: capture, write, verify and restore the state of a run."""
