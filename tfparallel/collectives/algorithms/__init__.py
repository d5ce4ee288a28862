"""All-reduce algorithms, one a file: who sends what to whom, and what it costs. Plain Python.

`catalog.ALGORITHMS` names them. A schedule is executed in TensorFlow by
`tfparallel.collectives.scheduled`, timed by `cost_model` and drawn by `drawing`.
"""
