r"""Recommend names to functions of Python's library, like films to users, with two towers.

Parallelism: `tensor` (also checked: `data`).
Why: the tables hold nearly all of the weights; each device stores the rows of half of the ids.

    tfparallel check models/recommender.py --parallel=tensor --num_devices=2 --steps=5
    tfparallel check models/recommender.py --parallel=data --num_devices=2 --steps=5
    tfparallel train models/recommender.py --parallel=tensor --num_devices=2 \
        --global_batch_size=512

No package that this project needs ships ratings. The data are still real: the "users" are the
functions of Python's standard library, and the "films" are the names (globals and attributes) that
they use. Each name that a function uses is paired with a negative example: a name that it does not
use, drawn in proportion to its use elsewhere. So popularity alone predicts no better than chance.
"""

import collections
import functools
import inspect
import types

import keras
import numpy as np
from language_model import sources

EPOCHS = 3
NUM_NAMES = 8192  # With the one that stands for "no further name", 0.
HISTORY_LENGTH = 16
WIDTH = 32
NAMES_OF_A_FUNCTION = 10
LEAST_NAMES = 5
LEAST_FUNCTIONS = 5
VALIDATION_SHARE = 0.1


def build_model():
    """Returns a model that outputs a logit, above zero where the function uses the name."""
    used = keras.Input((HISTORY_LENGTH,), dtype="int32", name="used")
    name = keras.Input((), dtype="int32", name="name")
    # One tower for the function, known by what it uses already, and one for the name.
    x = keras.layers.Embedding(NUM_NAMES, WIDTH, mask_zero=True, name="used_table")(used)
    x = keras.layers.GlobalAveragePooling1D(name="used_mean")(x)
    function = keras.layers.Dense(WIDTH, name="function")(x)
    candidate = keras.layers.Embedding(NUM_NAMES, WIDTH, name="name_table")(name)
    logit = keras.layers.Dot(axes=1, name="logit")([function, candidate])
    return keras.Model({"used": used, "name": name}, logit, name="recommender")


def compile_model(model):
    """Compiles the net with Adam, cross-entropy and the area under the ROC curve."""
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-5),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )


def load_data():
    """Returns (train, validation), each `({"used": ids, "name": ids}, labels)`.

    `used` is `(examples, 16)` in int32, 0 where a function has no further name; `name`
    `(examples,)` in int32; labels `(examples, 1)` in float32. No function is in both parts.
    """
    functions = names_of_functions()
    random = np.random.default_rng(0)
    order = random.permutation(len(functions))
    num_validation = int(len(order) * VALIDATION_SHARE)
    shuffled = [functions[index] for index in order]
    train, validation = shuffled[num_validation:], shuffled[:num_validation]
    return pairs(train, random), pairs(validation, random)


def pairs(functions, random):
    """Returns examples of names that a function uses, and a negative one beside each."""
    everything = np.concatenate(functions)
    padding = np.zeros(HISTORY_LENGTH, "int32")
    used, names, labels = [], [], []
    for function_names in functions:
        function_names = random.permutation(function_names)
        # Drawn from all uses: a frequent name is drawn often.
        others = random.choice(everything, NAMES_OF_A_FUNCTION)
        for name, other in zip(function_names, others, strict=False):
            history = function_names[function_names != name][:HISTORY_LENGTH]
            history = np.append(history, padding[len(history) :])
            for candidate, label in ((name, 1.0), (other, 0.0)):
                if label or candidate not in function_names:
                    used.append(history)
                    names.append(candidate)
                    labels.append(label)
    order = random.permutation(len(names))
    x = {"used": np.stack(used)[order], "name": np.array(names, "int32")[order]}
    return x, np.array(labels, "float32")[order, np.newaxis]


@functools.cache
def names_of_functions():
    """Returns for each function of the standard library the ids of its names, in int32."""
    functions = []
    for source in sources():
        try:
            module = compile(source, "<library>", "exec", dont_inherit=True)
        except SyntaxError:  # A template, or a test of bad syntax.
            continue
        functions += [code.co_names for code in functions_in(module)]
    counts = collections.Counter(name for names in functions for name in names)
    frequent = [name for name in counts if counts[name] >= LEAST_FUNCTIONS]
    frequent.sort(key=lambda name: (-counts[name], name))
    ids = {name: number for number, name in enumerate(frequent[: NUM_NAMES - 1], start=1)}
    ids_by_function = [[ids[name] for name in names if name in ids] for names in functions]
    return [np.array(names, "int32") for names in ids_by_function if len(names) >= LEAST_NAMES]


def functions_in(code):
    """Yields the code of all functions in a module, a class or a function."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:  # Not the body of a class.
                yield constant
            yield from functions_in(constant)
