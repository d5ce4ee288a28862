"""XLA: one device compiles its step as one program, a form what each of its devices does.

XLA draws other numbers than TensorFlow's kernels, so that one device is compiled, too.
"""

from __future__ import annotations

import keras
from keras import layers, optimizers

from .. import data, refusals
from ..programs import case, compiled, digits
from .layers import attention_net, dense, row_digits, stack, text_digits
from .metrics import conv_norm_net
from .optimizers import embedding_net, image_digits, overflowing, scaled_sgd, token_data
from .structures import digit_and_even, fit_evaluate_predict, several, several_data
from .training_steps import OnComputeLoss

GROUP = "XLA, `jit_compile=True`"


def dropout_net():
    return stack((64,), dense, lambda: layers.Dropout(0.3), dense)()


def masked_lstm():
    inputs = keras.Input((12,), dtype="int64")
    x = layers.Embedding(20, 6, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(10)(layers.LSTM(6, use_cudnn=False)(x)))


def compiled_by_xla(*arguments, **options):
    return compiled(*arguments, jit_compile=True, **options)


CASES = [
    case(
        GROUP,
        f"{feature}, compiled by XLA",
        f"jit_compile {name}",
        **({"compile": compiled_by_xla()} | fields),
    )
    for feature, name, fields in [
        ("dense layers", "dense", {}),
        ("dense layers", "float32", {"dtype": "float32"}),
        (
            "mixed precision",
            "mixed_float16",
            {
                "dtype": "mixed_float16",
                "compile": compiled_by_xla(scaled_sgd),
                "train": overflowing,
            },
        ),
        (
            "mixed precision",
            "mixed_bfloat16",
            {
                "dtype": "mixed_bfloat16",
                "compile": compiled_by_xla(lambda: optimizers.SGD(0.05)),
            },
        ),
        (
            "evaluation and prediction, metrics",
            "metrics",
            {
                "compile": compiled_by_xla(metrics=lambda: ["accuracy"]),
                "train": fit_evaluate_predict,
            },
        ),
        ("`Dropout`", "dropout", {"build": dropout_net}),
        (
            "`GaussianNoise`",
            "noise",
            {"build": stack((64,), dense, lambda: layers.GaussianNoise(0.2))},
        ),
        (
            "convolutions and batch normalization",
            "batch normalization",
            {
                "build": conv_norm_net,
                "data": image_digits,
                "refused": refusals.MOMENTS_OF_A_BATCH,
            },
        ),
        ("`MultiHeadAttention`", "attention", {"build": attention_net, "data": row_digits}),
        ("`LSTM` with a mask", "masked LSTM", {"build": masked_lstm, "data": text_digits}),
        (
            "embeddings with sparse gradients",
            "sparse gradients",
            {
                "build": embedding_net,
                "data": token_data,
                "compile": compiled_by_xla(lambda: optimizers.Adam(0.01)),
            },
        ),
        (
            "clipping and gradient accumulation",
            "clipped and accumulated",
            {
                "compile": compiled_by_xla(
                    lambda: optimizers.Adam(
                        0.01, global_clipnorm=0.1, gradient_accumulation_steps=2
                    )
                )
            },
        ),
        (
            "sample weights",
            "sample weights",
            {"data": lambda: digits() | {"sample_weight": data.weights()}},
        ),
        (
            "several inputs and outputs",
            "several",
            {
                "build": several,
                "data": several_data,
                "compile": compiled_by_xla(loss=digit_and_even),
            },
        ),
        (
            "a `train_step` of one's own",
            "train_step",
            {"build": OnComputeLoss, "refused": refusals.OWN_TRAIN_STEP},
        ),
        (
            "`steps_per_execution`",
            "steps_per_execution",
            {"compile": compiled_by_xla(steps_per_execution=4)},
        ),
    ]
]
