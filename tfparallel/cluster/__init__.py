"""Who takes part in a job; plain Python, so that a launcher is up in no time."""
