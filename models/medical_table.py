"""Classify tumours as malignant or benign from a table, with class weights and AUC.

Parallelism: `data` (also checked: `hybrid`, two replicas of two stages).
Why: the table is small, and class weights and AUC must cover the whole batch, not one replica's.

    tfparallel check models/medical_table.py --parallel=data --num_devices=3
    tfparallel check models/medical_table.py --parallel=hybrid --mesh=data=2,pipeline=2
    tfparallel train models/medical_table.py --parallel=data --num_devices=3

The data are the 569 samples of the Wisconsin breast cancer set that scikit-learn ships, as in
`mlp.py`. The mean, the error and the worst value of each measurement form three separate inputs.
The model standardizes them itself, and sample weights give both classes the same total weight.
"""

import keras
import numpy as np

EPOCHS = 20
SPLIT_SEED = 0
VALIDATION_SHARE = 0.2
KINDS = ("mean", "error", "worst")
NUM_MEASUREMENTS = 10


def build_model():
    """Returns a model that outputs one logit, above zero for malignant."""
    (train, _, _), _ = load_data()
    inputs = {kind: keras.Input((NUM_MEASUREMENTS,), name=kind) for kind in KINDS}
    branches = []
    for kind, values in inputs.items():
        standardize = keras.layers.Normalization(
            mean=train[kind].mean(axis=0),
            variance=train[kind].var(axis=0),
            name=f"{kind}_standardized",
        )
        hidden = keras.layers.Dense(16, activation="gelu", name=f"{kind}_hidden")
        branches.append(hidden(standardize(values)))
    x = keras.layers.Concatenate(name="all")(branches)
    x = keras.layers.Dropout(0.2, seed=0, name="dropout")(x)
    x = keras.layers.Dense(16, activation="gelu", name="hidden")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="logit")(x), name="medical_table")


def compile_model(model):
    """Compiles the net with AdamW, weighted cross-entropy, and the AUC without weights."""
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-3, weight_decay=1e-3, epsilon=1e-5),
        # Divides by the sum of the weights, not by the number of the examples.
        loss=keras.losses.BinaryCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
        weighted_metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="balanced_accuracy")],
    )


def load_data():
    """Returns (train, validation), each `(measurements, labels, weights)` in float32.

    Measurements are a dictionary of three arrays `(examples, 10)`; labels `(examples, 1)`, 1 for
    malignant; weights `(examples,)`, by which both classes count the same in all.
    """
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    columns = np.split(table.data.astype("float32"), len(KINDS), axis=1)
    # scikit-learn's labels are 0 for malignant and 1 for benign.
    malignant = 1 - table.target
    order = np.random.default_rng(SPLIT_SEED).permutation(len(malignant))
    num_validation = int(len(order) * VALIDATION_SHARE)
    validation, train = order[:num_validation], order[num_validation:]
    weight_of_class = len(train) / (2 * np.bincount(malignant[train]))
    return tuple(
        (
            {kind: values[rows] for kind, values in zip(KINDS, columns, strict=True)},
            malignant[rows, np.newaxis].astype("float32"),
            weight_of_class[malignant[rows]].astype("float32"),
        )
        for rows in (train, validation)
    )
