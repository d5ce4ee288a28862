"""Benchmarks of collectives: participants, timing, verification and presentation."""
