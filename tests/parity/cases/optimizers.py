"""Every Keras optimizer, and everything an optimizer does beside its step."""

from __future__ import annotations

import keras
from keras import layers, optimizers

from .. import data, refusals
from ..case import fit_arguments, observe, optimizers_of
from ..programs import case, compiled

GROUP = "Optimizers"

OPTIMIZERS = {
    "SGD": lambda **k: optimizers.SGD(0.1, **k),
    "SGD with momentum": lambda **k: optimizers.SGD(0.1, momentum=0.9, **k),
    "SGD with Nesterov momentum": lambda **k: optimizers.SGD(0.1, momentum=0.9, nesterov=True, **k),
    "Adam": lambda **k: optimizers.Adam(0.01, **k),
    "Adam with amsgrad": lambda **k: optimizers.Adam(0.01, amsgrad=True, **k),
    "AdamW": lambda **k: optimizers.AdamW(0.01, weight_decay=0.01, **k),
    "Nadam": lambda **k: optimizers.Nadam(0.01, **k),
    "Adamax": lambda **k: optimizers.Adamax(0.01, **k),
    "Adagrad": lambda **k: optimizers.Adagrad(0.1, **k),
    "Adadelta": lambda **k: optimizers.Adadelta(1.0, **k),
    "RMSprop": lambda **k: optimizers.RMSprop(0.01, **k),
    "RMSprop centered with momentum": lambda **k: optimizers.RMSprop(
        0.01, momentum=0.9, centered=True, **k
    ),
    "Ftrl": lambda **k: optimizers.Ftrl(
        0.1, l1_regularization_strength=1e-3, l2_regularization_strength=1e-3, **k
    ),
    "Lion": lambda **k: optimizers.Lion(0.003, **k),
    "Lamb": lambda **k: optimizers.Lamb(0.01, **k),
    "Adafactor": lambda **k: optimizers.Adafactor(0.1, **k),
    "Muon": lambda **k: optimizers.Muon(0.01, **k),
    "ScheduleFreeAdamW": lambda **k: optimizers.ScheduleFreeAdamW(0.01, **k),
    "LossScaleOptimizer": lambda **k: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1, momentum=0.9, **k), initial_scale=2.0**10, dynamic_growth_steps=5
    ),
}


def multi_optimizer() -> optimizers.Optimizer:
    """SGD for the kernels, Adam for every other variable."""
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.01), {".*kernel": optimizers.SGD(0.1)})
    )


def half_precision(form, case):
    """Trains in half precision and counts the updates that overflow skipped."""
    model = form.model(case)
    arguments = fit_arguments(case)
    history = model.fit(**arguments)
    (optimizer,) = optimizers_of(model)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = 6 * arguments["epochs"]
    # Compared with the same tolerance as all else, which no count of at most 24
    # can pass without being equal.
    return observe(
        model,
        history.history,
        skipped_updates=steps - int(keras.ops.convert_to_numpy(inner.iterations)),
    )


def overflowing(form, case):
    """The same of a case in which some updates, and not all, must overflow."""
    seen = half_precision(form, case)
    skipped, steps = int(seen["output:skipped_updates"]), 6 * fit_arguments(case)["epochs"]
    if not 0 < skipped < steps:
        raise AssertionError(
            f"'{case.name}' under {form.name} must skip some of its {steps} updates, "
            f"and not all. Received: {skipped} skipped"
        )
    return seen


def scaled_sgd():
    """Overflows float16 at first, and halves the scale at every skipped update."""
    return optimizers.LossScaleOptimizer(
        optimizers.SGD(0.01, momentum=0.9), initial_scale=2.0**24, dynamic_growth_steps=6
    )


def conv_net():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def image_digits():
    x, y = data.images()
    return {"x": x, "y": y}


def _optimizer_case(name, make, feature=None, **fields):
    fields = {"compile": compiled(make)} | fields
    return case(GROUP, feature or f"`{name.split(' ')[0]}`", f"optimizer {name}", **fields)


def built_before_fit(form, case):
    """Trains with an optimizer that is built before `fit`.

    Left to `fit`, Keras 3.15 builds ScheduleFreeAdamW inside the traced step, whose
    graph then sets the momentum back to the weights at every step (losses 2.29,
    2.29, 2.28 where built first gives 2.07, 1.84, 1.67, as `run_eagerly` does); see
    `test_keras_sets_a_momentum_back_at_every_step`.
    """
    model = form.model(case)
    model.optimizer.build(model.trainable_variables)
    return observe(model, model.fit(**fit_arguments(case, form)).history)


# Whose update of an element looks at others.
OF_WHOLE_WEIGHTS = {"Lamb", "Adafactor", "Muon"}

CASES = [
    _optimizer_case(
        name,
        make,
        **({"baseline": built_before_fit} if name == "ScheduleFreeAdamW" else {}),
        **({"refused": refusals.LOOKS_AT_WHOLE_WEIGHTS} if name in OF_WHOLE_WEIGHTS else {}),
    )
    for name, make in OPTIMIZERS.items()
]
CASES += [_optimizer_case("MultiOptimizer", multi_optimizer)]

CLIPPING = {
    # Thresholds that the gradients of this net pass on most steps.
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.005},
}
CASES += [
    _optimizer_case(
        f"{name} {argument}", lambda m=OPTIMIZERS[name], k=arguments: m(**k), f"`{argument}`"
    )
    for argument, arguments in CLIPPING.items()
    for name in ("SGD with momentum", "Adam")
]
CASES += [
    _optimizer_case(
        f"{name} weight_decay",
        lambda m=OPTIMIZERS[name]: m(weight_decay=0.02),
        "`weight_decay`",
    )
    for name in ("SGD with momentum", "RMSprop")
]

SCHEDULES = {
    "ExponentialDecay": lambda: optimizers.schedules.ExponentialDecay(0.2, 3, 0.8),
    "CosineDecay with warmup": lambda: optimizers.schedules.CosineDecay(
        0.01, 20, warmup_target=0.2, warmup_steps=5
    ),
    "PiecewiseConstantDecay": lambda: optimizers.schedules.PiecewiseConstantDecay(
        [5, 12], [0.2, 0.1, 0.05]
    ),
    "InverseTimeDecay": lambda: optimizers.schedules.InverseTimeDecay(0.2, 3, 0.5),
    "PolynomialDecay": lambda: optimizers.schedules.PolynomialDecay(0.2, 20),
    "CosineDecayRestarts": lambda: optimizers.schedules.CosineDecayRestarts(0.2, 7),
}
CASES += [
    _optimizer_case(
        f"schedule {name}",
        lambda s=make: optimizers.SGD(s(), momentum=0.9),
        "learning-rate schedules",
    )
    for index, (name, make) in enumerate(SCHEDULES.items())
]

CASES += [
    # 24 steps are no multiple of 5: the last accumulation stays open.
    _optimizer_case(
        f"{name} accumulating {steps} steps",
        lambda m=OPTIMIZERS[name], s=steps, k=extra: m(gradient_accumulation_steps=s, **k),
        "`gradient_accumulation_steps`",
    )
    for name, steps, extra in [
        ("SGD with momentum", 3, {}),
        ("Adam", 5, {"global_clipnorm": 0.1}),
    ]
]
CASES += [
    _optimizer_case(
        f"{name} use_ema overwriting every {overwrite}",
        lambda m=OPTIMIZERS[name], o=overwrite: m(
            use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=o
        ),
        "`use_ema`, `ema_overwrite_frequency`",
    )
    for name, overwrite in [("SGD with momentum", 5), ("Adam", 7), ("Adam", None)]
]
CASES += [
    _optimizer_case(
        "everything at once",
        lambda: optimizers.AdamW(
            optimizers.schedules.ExponentialDecay(0.02, 3, 0.9),
            weight_decay=0.01,
            global_clipnorm=0.2,
            gradient_accumulation_steps=2,
            use_ema=True,
            ema_overwrite_frequency=3,
        ),
        "all of these together",
    )
]

CASES += [
    case(
        GROUP,
        "`mixed_float16` with loss scaling, and the skipped updates",
        "mixed_float16 that skips updates",
        dtype="mixed_float16",
        compile=compiled(scaled_sgd),
        train=overflowing,
    ),
    case(
        GROUP,
        "`mixed_float16` with loss scaling, and the skipped updates",
        "mixed_float16 convolutions wrapped by compile",
        dtype="mixed_float16",
        build=conv_net,
        data=image_digits,
        compile=compiled(lambda: optimizers.SGD(0.05)),
        train=half_precision,
        # The gradient of a bias adds up a term for each place of each image, in half precision: a
        # processor that has sums of its own for that is up to 1.1e-2 apart on half the channels.
        tolerance=3e-2,
    ),
    case(
        GROUP,
        "`mixed_bfloat16`",
        "mixed_bfloat16",
        dtype="mixed_bfloat16",
        compile=compiled(lambda: optimizers.SGD(0.05)),
    ),
    case(GROUP, "`float32`", "float32", dtype="float32"),
    case(
        GROUP,
        "`float32`",
        "float32 convolutions",
        dtype="float32",
        build=conv_net,
        data=image_digits,
    ),
]


def frozen_variable_net():
    """The second output is not trained: the gradient of its kernel is None."""
    inputs = keras.Input((64,))
    hidden = layers.Dense(8, activation="tanh", name="hidden")(inputs)
    used = layers.Dense(10, name="used")(hidden)
    unused = layers.Dense(3, name="unused")(hidden)
    return keras.Model(inputs, {"used": used, "unused": unused})


CASES += [
    case(
        GROUP,
        "variables whose gradient is None",
        f"gradient None under {name}",
        build=frozen_variable_net,
        compile=compiled(
            make, lambda: {"used": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        ),
        data=lambda: {"x": data.flat()[0], "y": {"used": data.flat()[1]}},
    )
    for name, make in [("SGD", OPTIMIZERS["SGD"]), ("AdamW", OPTIMIZERS["AdamW"])]
]


def embedding_net():
    return keras.Sequential(
        [
            keras.Input((12,), dtype="int64"),
            layers.Embedding(40, 6),
            layers.GlobalAveragePooling1D(),
            layers.Dense(10),
        ]
    )


def token_data():
    x, y = data.tokens()
    return {"x": x, "y": y}


CASES += [
    case(
        GROUP,
        "embeddings with sparse gradients",
        f"sparse gradients under {name}",
        build=embedding_net,
        compile=compiled(make),
        data=token_data,
    )
    for name, make in [
        ("SGD with momentum", OPTIMIZERS["SGD with momentum"]),
        # Adam squares the slices of a sparse gradient before it sums duplicates.
        ("Adam", OPTIMIZERS["Adam"]),
        ("Adam with clipping", lambda: optimizers.Adam(0.01, global_clipnorm=0.1)),
        ("accumulation", lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    ]
]
