"""What TensorFlow and Keras have no public name for: the only imports of their insides.

Nothing here decides anything. Which fault of theirs each name answers, and which test fails on the
day that it moves or is no longer needed, is in `docs/upstream.md`. Tried on TensorFlow 2.19
to 2.21 and Keras 3.10 to 3.15.
"""
