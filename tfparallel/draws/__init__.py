"""Random numbers of a piece of the batch: those that one device draws for the same rows.

`replica_seeds` gives replicas the seeds of random layers and Keras's global one; `row_draws` draws,
and keeps the rows of the piece.
"""
