"""What every kind of parallelism runs: pieces of a batch, and the proof that they may be pieces."""
