"""Variables that are more than one: with a copy in each replica of a mesh, or in parts.

`copies` has those of a mesh, `split` those that lie in parts. Those of a strategy are
`tf.distribute`'s (`strategies/variables.py`).
"""
