"""Writing the state of a run, and resuming from it."""
