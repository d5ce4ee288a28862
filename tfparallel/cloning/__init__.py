"""Copies of a built Keras model that are like it, or an error that says why not."""
