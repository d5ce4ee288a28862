r"""Predict the energy of clusters of argon atoms; its negative gradient is the force on each.

Parallelism: `data` (also checked: `pipeline`).
Why: clusters are independent rows, and there are many.

    tfparallel check models/molecules.py --parallel=data --num_devices=2 --steps=5
    tfparallel check models/molecules.py --parallel=pipeline --num_devices=2 \
        --num_micro_batches=4 --steps=5
    tfparallel train models/molecules.py --parallel=data --num_devices=2

The data follow a law: positions of six atoms are random, and the energy is the sum of the
Lennard-Jones potential, 4 (r⁻¹² - r⁻⁶), over all pairs; lengths and energies are in units of σ and
ε. The net sees positions alone, through distances, so turning or renumbering the atoms changes
nothing.

References:
    Jones. On the determination of molecular fields. Proceedings of the Royal Society A 106, 1924.
    Schütt and others. SchNet: a continuous-filter convolutional neural network for modeling
    quantum interactions. NeurIPS 2017.
"""

import keras
import numpy as np
from keras import ops

EPOCHS = 20
NUM_ATOMS = 6
NUM_TRAIN, NUM_VALIDATION = 8000, 1000
NEAREST, FARTHEST = 0.95, 3.0  # Distances between two atoms, in σ.
NUM_CENTERS = 32


@keras.saving.register_keras_serializable(package="tfparallel_models")
class PairDistances(keras.layers.Layer):
    """Maps positions, `(batch, atoms, 3)`, to 32 features of each pair, `(batch, pairs, 32)`."""

    def call(self, positions):
        """Returns Gaussians of the distances, around centers from the nearest to the farthest."""
        first, second = np.triu_indices(positions.shape[1], k=1)
        steps = ops.take(positions, first, axis=1) - ops.take(positions, second, axis=1)
        distances = ops.sqrt(ops.sum(ops.square(steps), axis=-1, keepdims=True))
        centers = ops.cast(np.linspace(NEAREST, FARTHEST, NUM_CENTERS), positions.dtype)
        width = (FARTHEST - NEAREST) / NUM_CENTERS
        return ops.exp(-0.5 * ops.square((distances - centers) / width))


@keras.saving.register_keras_serializable(package="tfparallel_models")
class SumOverPairs(keras.layers.Layer):
    """Sums the energies of all pairs, `(batch, pairs, 1)`, to `(batch, 1)`."""

    def call(self, energies):
        """Returns the energy of each cluster."""
        return ops.sum(energies, axis=1)


def build_model():
    """Returns a model that outputs the energy of a cluster, in ε."""
    return keras.Sequential(
        [
            keras.Input((NUM_ATOMS, 3), name="positions"),
            PairDistances(name="distances"),
            keras.layers.Dense(32, activation="tanh", name="hidden1"),
            keras.layers.Dense(32, activation="tanh", name="hidden2"),
            keras.layers.Dense(1, name="pair_energy"),
            SumOverPairs(name="energy"),
        ],
        name="molecules",
    )


def compile_model(model):
    """Compiles the net with Adam, squared error, and the absolute error in ε."""
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3, epsilon=1e-4),
        loss="mean_squared_error",
        metrics=[keras.metrics.MeanAbsoluteError(name="mae")],
    )


def load_data():
    """Returns (train, validation), each `(positions, energies)` in float32.

    Positions `(clusters, 6, 3)` in σ, energies `(clusters, 1)` in ε.
    """
    positions = clusters(NUM_TRAIN + NUM_VALIDATION, np.random.default_rng(0))
    energies = energy(positions)[:, np.newaxis]
    examples = positions.astype("float32"), energies.astype("float32")
    return tuple(a[:NUM_TRAIN] for a in examples), tuple(a[NUM_TRAIN:] for a in examples)


def clusters(num, random):
    """Draws `num` clusters, `(num, 6, 3)`, in which no two atoms are too near or too far."""
    accepted = np.empty((0, NUM_ATOMS, 3))
    while len(accepted) < num:
        drawn = random.uniform(-1.1, 1.1, size=(20 * num, NUM_ATOMS, 3))
        apart = distances(drawn)
        fits = (apart.min(axis=1) > NEAREST) & (apart.max(axis=1) < FARTHEST)
        accepted = np.concatenate([accepted, drawn[fits]])
    return accepted[:num]


def distances(positions):
    """Returns the distances of all pairs, `(clusters, pairs)`."""
    first, second = np.triu_indices(positions.shape[1], k=1)
    return np.linalg.norm(positions[:, first] - positions[:, second], axis=-1)


def energy(positions):
    """Returns the Lennard-Jones energy of each cluster, `(clusters,)`, in ε."""
    sixth = distances(positions) ** -6.0
    return 4 * np.sum(sixth**2 - sixth, axis=1)
