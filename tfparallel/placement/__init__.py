"""Layers on devices: where each stands, and that all of it stands there."""
