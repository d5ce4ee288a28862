"""One step of training, for the whole batch, where its rows are.

`loss_terms` has the numerators of a piece and the divisors of the whole batch; `additivity` judges
which losses and metrics of a compiled model can be computed piece by piece.
"""
