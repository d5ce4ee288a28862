"""The one optimizer: Keras's own update, of units, at places.

    weight of the model     kernel (4, 6)
    units                   itself │ its parts, one on each device │ a share of it, or of each part
    places                  one │ each replica: a copy of every unit, and of every slot

    gradient ──expand──► of each unit, at each place
                         clipped by the norms of whole weights
                         Keras's `apply`, at each place on its own copies
    weight  ◄─contract── shares joined, constraints of wholes

What looks at several weights at once, a learning rate, a moving average, a count of the steps: each
place computes it of its own copies, so that nothing is sent. Where two runs of an update may
differ, the first place alone makes it, and sends what comes of it.
"""
