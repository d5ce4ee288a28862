"""Private names of TensorFlow and Keras that have no public counterpart; only imported here.

Nothing here decides anything. `docs/upstream.md` lists the upstream fault behind each name, and the
test that fails once the name moves or is no longer needed. Tested with TensorFlow 2.19 to 2.21 and
Keras 3.10 to 3.15.
"""
