"""Exact copies of a built Keras model, or an error that says why not."""
