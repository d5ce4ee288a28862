"""The optimizer: runs Keras's own update on units at places.

    weight of the model     kernel (4, 6)
    units                   itself │ its parts, one on each device │ a share of it, or of each part
    places                  one │ each replica: a copy of every unit, and of every slot

    gradient ──expand──► of each unit, at each place
                         clipped by the norms of whole weights
                         Keras's `apply`, at each place on its own copies
    weight  ◄─contract── shares joined, constraints of whole weights

Each place computes values over several weights (a norm, a moving average, the step count) from its
own copies, so an update sends nothing but shares. If two runs of an update may differ, because the
optimizer, its schedule or a constraint is the user's own, only the first place runs it and sends
the result.
"""
