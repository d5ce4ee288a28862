"""Updates of several steps, and an optimizer in shares: forms that have replicas, or micro-batches.

`fit` under `sync="accumulate:3"` is compared with batches of 51 on one device: six steps of 17 and
a last one of 2 are two updates, of 51 and of 36 examples.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, optimizers

from .. import data
from ..case import fit_arguments, observe
from ..programs import case, compiled
from .losses import masked_text, next_token

GROUP = "Updates of several steps, and in shares"

ACCUMULATING = {"sync": "accumulate:3"}
SHARING = {"shard": "optimizer"}
ACCUMULATE = ("data_parallel", "pipeline_parallel", "hybrid_parallel", "workers")
SHARE = ("data_parallel", "hybrid_parallel", "workers")
SHARE_WEIGHTS = ("data_parallel", "workers")


def larger_batches(form, case):
    """Three batches as one."""
    model = form.model(case)
    arguments = fit_arguments(case) | {"batch_size": 51}
    return observe(model, without_loss(model.fit(**arguments).history, case))


def several_steps(form, case):
    """The same batches, one by one."""
    model = form.model(case)
    return observe(model, without_loss(model.fit(**fit_arguments(case)).history, case))


def without_loss(history, case):
    """Of masked rows Keras's mean over an epoch depends on the batches."""
    return {} if "mask" in case.name else history



def accumulated(name, **fields):
    fields = {"options": ACCUMULATING, "forms": ACCUMULATE} | fields
    return case(
        GROUP,
        '`sync="accumulate:N"` beside batches N times as large',
        name,
        train=several_steps,
        baseline=larger_batches,
        drop_in=False,
        **fields,
    )


def shared(name, **fields):
    return case(
        GROUP,
        '`shard="optimizer"`',
        name,
        options=SHARING,
        forms=SHARE,
        drop_in=False,
        **fields,
    )


def wide(normalization=layers.BatchNormalization) -> keras.Model:
    """Two weights that are large enough to be shared out, one of which convolves."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(80, "tanh", kernel_regularizer="l2"),
            layers.Reshape((20, 4)),
            layers.Conv1D(64, 17, use_bias=False),
            normalization(),
            layers.GlobalAveragePooling1D(),
            layers.Dense(10),
        ]
    )


def wide_by_rows() -> keras.Model:
    """The same, of which several steps may be one update."""
    return wide(layers.LayerNormalization)


def shared_weights(name, optimizer):
    return case(
        GROUP,
        '`shard="parameters"`',
        name,
        build=wide,
        compile=compiled(optimizer, metrics=["accuracy"]),
        options={"shard": "parameters"},
        forms=SHARE_WEIGHTS,
        drop_in=False,
    )


CASES = [
    shared_weights("shares of weights under Adam", lambda: optimizers.Adam(0.01, clipnorm=0.1)),
    shared_weights(
        "shares of weights, averaged",
        lambda: optimizers.AdamW(
            0.01, 0.01, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=7
        ),
    ),
    shared_weights(
        "shares of weights, and of gradients of three steps",
        lambda: optimizers.Adam(0.01, global_clipnorm=0.5, gradient_accumulation_steps=3),
    ),
    *(
        accumulated(
            f"three steps an update, shard={shard}",
            build=wide_by_rows,
            compile=compiled(lambda: optimizers.Adam(0.01, clipnorm=0.1), metrics=["accuracy"]),
            options=ACCUMULATING | {"shard": shard},
            forms=SHARE_WEIGHTS,
        )
        for shard in ("gradients", "parameters")
    ),
    accumulated("three steps an update"),
    accumulated(
        "three steps an update, of sample weights",
        data=lambda: dict(zip(("x", "y"), data.flat(), strict=True))
        | {"sample_weight": data.weights()},
        compile=compiled(lambda: optimizers.Adam(0.01, global_clipnorm=0.5)),
    ),
    accumulated(
        "three steps an update, of a mask",
        build=masked_text(True),
        data=lambda: next_token() | {"sample_weight": np.tile(data.weights()[:, None], (1, 12))},
    ),
    shared("shares of Adam", compile=compiled(lambda: optimizers.Adam(0.01))),
    shared(
        "shares of AdamW, clipped and averaged",
        compile=compiled(
            lambda: optimizers.AdamW(
                0.01, 0.01, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=7
            )
        ),
    ),
    shared(
        "shares of an embedding's optimizer",
        build=masked_text(True),
        data=next_token,
        compile=compiled(lambda: optimizers.Adam(0.01, clipnorm=0.1)),
    ),
]
