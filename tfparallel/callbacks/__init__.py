"""Keras callbacks that a user may give to `fit`."""
