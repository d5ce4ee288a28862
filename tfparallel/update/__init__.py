"""The one optimizer: Keras's own update, of units, at places.

    weight of the model     kernel (4, 6)
    units                   itself │ its parts, one on each device │ a share of it, or of each part
    places                  one │ each replica: a copy of every unit, and of every slot

    gradient ──expand──► of each unit, at each place
                         clipped by the norms of whole weights
                         Keras's `apply`, at each place on its own copies
    weight  ◄─contract── shares joined, constraints of wholes

Whatever looks at several weights at once (a norm, a moving average, the count of the steps) each
place computes from its own copies, so that an update sends nothing but shares. Where two runs of an
update may differ, because the optimizer, its schedule or a constraint is the user's own, the first
place alone makes it and sends the result.
"""
