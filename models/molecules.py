"""Predict the energy of clusters of argon atoms, and the force on each atom.

Parallelism: `data` (also checked: `tensor`).
Why: clusters are independent rows, and there are many.

    tfparallel check models/molecules.py --parallel=data --num_devices=2 --steps=5
    tfparallel check models/molecules.py --parallel=tensor --num_devices=2 --steps=5
    tfparallel train models/molecules.py --parallel=data --num_devices=2

The data follow a law: positions of six atoms are random, and the energy is the sum of the
Lennard-Jones potential, 4 (r⁻¹² - r⁻⁶), over all pairs; lengths and energies are in units of σ and
ε. The net sees positions alone, through distances, so turning or renumbering the atoms changes
nothing.

Molecular dynamics needs forces, F = -∂E/∂positions. They are the gradient of the net's energy, so
they conserve it, and the net is trained on both: on (E - Ê)² and on the mean of (F - F̂)². The
gradient of such a loss is a gradient of a gradient.

References:
    Behler, Parrinello. Generalized neural-network representation of high-dimensional
    potential-energy surfaces. Physical Review Letters 98, 2007.
    Jones. On the determination of molecular fields. Proceedings of the Royal Society A 106, 1924.
    Schütt and others. SchNet: a continuous-filter convolutional neural network for modeling
    quantum interactions. NeurIPS 2017.
"""

import keras
import numpy as np
import tensorflow as tf
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


@keras.saving.register_keras_serializable(package="tfparallel_models")
class EnergyAndForces(keras.layers.Layer):
    """Maps positions, `(batch, atoms, 3)`, to the energy and to its negative gradient.

    Args:
        energy: The model of the energy, `(batch, 1)`.
    """

    def __init__(self, energy, **kwargs):
        super().__init__(**kwargs)
        self.energy = energy

    def call(self, positions):
        """Returns the energy of each cluster, and the forces on its atoms, `(batch, atoms, 3)`."""
        with tf.GradientTape() as tape:
            tape.watch(positions)
            energy = self.energy(positions)
        return {"energy": energy, "forces": -tape.gradient(energy, positions)}

    def get_config(self):
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "energy": keras.saving.serialize_keras_object(self.energy)}

    @classmethod
    def from_config(cls, config):
        """Returns a layer with these arguments."""
        return cls(**{**config, "energy": keras.saving.deserialize_keras_object(config["energy"])})


def build_model():
    """Returns a model that outputs the energy of a cluster, in ε, and forces, in ε/σ."""
    energy = keras.Sequential(
        [
            keras.Input((NUM_ATOMS, 3)),
            PairDistances(name="distances"),
            keras.layers.Dense(32, activation="tanh", name="hidden1"),
            keras.layers.Dense(32, activation="tanh", name="hidden2"),
            keras.layers.Dense(1, name="pair_energy"),
            SumOverPairs(name="sum"),
        ],
        name="potential",
    )
    positions = keras.Input((NUM_ATOMS, 3), name="positions")
    outputs = EnergyAndForces(energy, name="energy_and_forces")(positions)
    return keras.Model(positions, outputs, name="molecules")


def compile_model(model):
    """Compiles the net with Adam, squared errors, and absolute errors in ε and ε/σ."""
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3, epsilon=1e-4),
        loss={"energy": "mean_squared_error", "forces": "mean_squared_error"},
        metrics={
            name: [keras.metrics.MeanAbsoluteError(name="mae")] for name in ("energy", "forces")
        },
    )


def load_data():
    """Returns (train, validation), each `(positions, {"energy": …, "forces": …})` in float32.

    Positions `(clusters, 6, 3)` in σ, energies `(clusters, 1)` in ε, forces like positions.
    """
    positions = clusters(NUM_TRAIN + NUM_VALIDATION, np.random.default_rng(0))
    labels = {"energy": energy(positions)[:, np.newaxis], "forces": forces(positions)}
    examples = keras.tree.map_structure(lambda a: a.astype("float32"), (positions, labels))
    train = keras.tree.map_structure(lambda a: a[:NUM_TRAIN], examples)
    return train, keras.tree.map_structure(lambda a: a[NUM_TRAIN:], examples)


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


def forces(positions):
    """Returns the force on each atom, `(clusters, 6, 3)`, in ε/σ: the sum over the others."""
    steps = positions[:, :, np.newaxis] - positions[:, np.newaxis]
    squares = np.square(steps).sum(axis=-1, keepdims=True)
    squares += np.eye(positions.shape[1])[..., np.newaxis]  # Not of an atom on itself: 0 · r⁻⁸.
    return np.sum(24 * (2 * squares**-7 - squares**-4) * steps, axis=2)
