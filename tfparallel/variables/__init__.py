"""Variables that lie in parts, and the replicas in which a variable has copies.

The copies are those of `strategies/variables.py`.
"""
