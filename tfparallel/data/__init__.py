"""Seeded order of examples, and the global batches of a `fit`."""
