"""What every form of parallelism runs: pieces of a batch, and the proof that they may be pieces."""
