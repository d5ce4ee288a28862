"""One step of training on the whole batch, with each row on its own device.

`loss_terms` computes the numerators of a piece and the divisors of the whole batch; `additivity`
judges which losses and metrics of a compiled model can be computed by pieces.
"""
