"""Split and sharded variables, and the replicas of a mesh.

`strategies/variables.py` has the copies of a variable in replicas.
"""
