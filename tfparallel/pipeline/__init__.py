"""Micro-batches through stages on several devices, all of them at work at once."""
