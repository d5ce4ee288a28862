"""The cases by theme. `ALL` is every case, in the order of the table."""

from . import (
    clones,
    inputs,
    layers,
    losses,
    metrics,
    optimizers,
    randomness,
    rows,
    split,
    structures,
    synchronization,
    training_steps,
    workflows,
    xla,
)

ALL = [
    *optimizers.CASES,
    *synchronization.CASES,
    *losses.CASES,
    *structures.CASES,
    *metrics.CASES,
    *layers.CASES,
    *split.CASES,
    *randomness.CASES,
    *rows.CASES,
    *inputs.CASES,
    *training_steps.CASES,
    *workflows.CASES,
    *clones.CASES,
    *xla.CASES,
]
