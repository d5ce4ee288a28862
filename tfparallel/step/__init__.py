"""One step of training on the whole batch, with each row on its own device.

`extended_model` overrides each method of Keras's trainer once. `where_rows_meet` decides whether
the loss is computed by pieces, and `row_counts` checks that pieces have the rows that they should.
`loss_terms` computes the numerators of a piece and the divisors of the whole batch; `additivity`
judges which losses and metrics of a compiled model can be computed by pieces.
"""
