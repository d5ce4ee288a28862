"""A parity case: a small Keras program, trained on one device and under a form.

Every case is plain Keras. What changes between two runs is the *form*, the
object that builds and compiles the model:

    Plain()                        build(); compile(model)
    Builder(devices)               tfparallel.data_parallel(build, devices=...)
    DropIn(devices)                the same code under MirroredStrategy.scope()
    Stages(devices)                tfparallel.model_parallel(build, devices=...)
    Split(devices)                 tfparallel.tensor_parallel(build, devices=...)
    Pipeline(devices)              tfparallel.pipeline_parallel(build, devices=...)

A case trains under a form and returns what it *observed*: a flat dictionary of
arrays, every variable of the model and of its optimizers by path, every loss and
metric of every epoch. Two observations are compared name by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import pathlib
import pickle
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Observed = dict[str, np.ndarray]

# The verdict is float64. In float32 sums in another order differ in the last of
# 7 digits, and 24 steps of training multiply that; half precision rounds to 3
# digits (float16) or 2 (bfloat16), and so do its sums.
TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "mixed_float16": 1e-2,
    "mixed_bfloat16": 1e-2,
}

# A difference is relative to the largest element of its variable. Below these
# floors it is absolute: a variable whose true gradient is zero (a bias before
# batch normalization) holds rounding noise alone, and noise over noise is 1.
FLOOR = {"weight": 1e-2, "slot": 1e-6, "history": 1e-6, "output": 1e-6}

# Where the processes of a session that trains all pairs keep what one device did.
ONE_DEVICE_FOLDER = "TFPARALLEL_PARITY_ONE_DEVICE"

EXACT, REFUSED = "exact", "refused"


@dataclasses.dataclass(frozen=True)
class Case:
    """One row's worth of parity: a model, how it is compiled, fed and trained.

    Args:
        group: The section of the table, a bullet of the promise.
        feature: The row of the table; several cases may share one.
        name: Unique, the test's id.
        build: Returns an uncompiled Keras model.
        compile: Compiles it.
        data: Returns the keyword arguments of `fit` that hold data.
        fit: Further keyword arguments of `fit`.
        train: Trains under a form and returns what it observed.
        baseline: What the result is compared with, where that is another
            program than `train` on one device (a run without interruption).
        refused: The forms that refuse the case instead, each with what its error says, a
            regular expression. A form that is not named must train.
        dtype: The dtype policy under which all of it runs.
        tolerance: Replaces the dtype's, with its reason beside the case.
        drop_in: Whether the case is also run as plain code under the drop-in
            strategy.
        options: What the builder is given besides the model and the devices.
        forms: The forms that take these options; all of them if empty.
    """

    group: str
    feature: str
    name: str
    build: Callable[[], keras.Model]
    compile: Callable[[keras.Model], None]
    data: Callable[[], dict[str, Any]]
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: Callable[[Any, Case], Observed] | None = None
    baseline: Callable[[Any, Case], Observed] | None = None
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    dtype: str = "float64"
    tolerance: float | None = None
    drop_in: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    forms: tuple[str, ...] = ()

    def runs_under(self, form: str) -> bool:
        """Whether a form of this name trains the case, or refuses it."""
        if form == DropIn.name:
            return self.drop_in
        return not self.forms or form in self.forms

    @property
    def limit(self) -> float:
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance

    def expects(self, form: str, error: Exception) -> bool:
        """Whether `form` refuses this case, and in these words."""
        return any(re.search(said, str(error)) for said in self.refusals(form))

    def refusals(self, form: str) -> list[str]:
        """What `form` may say to this case, regular expressions; none where it must train it.

        A mesh refuses what its axes refuse: "hybrid_parallel 2 x 2 x 1" what a pipeline does.
        """
        name, _, mesh = form.partition(" ")
        forms = [name]
        if mesh:
            forms += ["pipeline_parallel"]
            forms += ["tensor_parallel"] * (not mesh.endswith("1"))
        return [self.refused[each] for each in forms if each in self.refused]


class Plain:
    """One device, plain Keras."""

    name = "one device"
    builder_options: dict[str, Any] = {}  # Set by `run`, from the case.

    def model(self, case: Case) -> keras.Model:
        return self.make(case.build, case.compile)

    def make(self, build, compile=None) -> keras.Model:
        model = build()
        if compile is not None:
            compile(model)
        return model

    def compile(self, model: keras.Model, compile) -> None:
        compile(model)

    @contextlib.contextmanager
    def directory(self) -> Iterator[str]:
        """A folder that all workers see."""
        with tempfile.TemporaryDirectory() as folder:
            yield folder

    def wait_for_all(self) -> None:
        """Returns when all workers have come here."""


class Builder(Plain):
    """`tfparallel.data_parallel` over `devices`."""

    name = "data_parallel"

    def __init__(self, devices: list[str]):
        self.devices = devices

    def make(self, build, compile=None) -> keras.Model:
        import tfparallel

        model = tfparallel.data_parallel(build, devices=self.devices, **self.builder_options)
        if compile is not None:
            compile(model)
        return model


class DropIn(Plain):
    """Plain Keras code under the scope of `tfparallel.MirroredStrategy`."""

    name = "MirroredStrategy"

    def __init__(self, devices: list[str]):
        import tfparallel

        self.devices = devices
        self.strategy = tfparallel.MirroredStrategy(devices)

    def make(self, build, compile=None) -> keras.Model:
        with self.strategy.scope():
            model = build() if callable(build) and not isinstance(build, keras.Model) else build
            if compile is not None:
                compile(model)
        return model

    def compile(self, model, compile) -> None:
        with self.strategy.scope():
            compile(model)


class Stages(Plain):
    """`tfparallel.model_parallel` with a stage on each of `devices`."""

    name = "model_parallel"

    def __init__(self, devices: list[str]):
        self.devices = devices

    def make(self, build, compile=None) -> keras.Model:
        import tfparallel

        model = tfparallel.model_parallel(build, devices=self.devices)
        if compile is not None:
            compile(model)
        return model


class Split(Plain):
    """`tfparallel.tensor_parallel` with a part of each layer on each of `devices`."""

    name = "tensor_parallel"

    def __init__(self, devices: list[str]):
        self.devices = devices

    def make(self, build, compile=None) -> keras.Model:
        import tfparallel

        model = tfparallel.tensor_parallel(build, devices=self.devices)
        if compile is not None:
            compile(model)
        return model


class Pipeline(Plain):
    """`tfparallel.pipeline_parallel` with a stage on each of `devices`, and 4 micro-batches.

    A model with fewer layers than stages has stages without a layer.
    """

    name = "pipeline_parallel"

    def __init__(self, devices: list[str], schedule: str = "1f1b", **options):
        self.devices = devices
        self.options = {"num_micro_batches": 4, "schedule": schedule, "balance": "memory"} | options

    def make(self, build, compile=None) -> keras.Model:
        import tfparallel

        model = tfparallel.pipeline_parallel(
            build, self.devices, allow_empty_stages=True, **self.options, **self.builder_options
        )
        if compile is not None:
            compile(model)
        return model


class Hybrid(Plain):
    """`tfparallel.hybrid_parallel` on `devices`, with a mesh such as "2 x 2 x 1".

    As many micro-batches as stages, and stages without a layer, as above.
    """

    def __init__(self, devices: list[str], mesh: str, **options):
        self.name = f"hybrid_parallel {mesh}"
        self.sizes = [int(size) for size in mesh.split(" x ")]
        self.devices = devices[: math.prod(self.sizes)]
        self.options = options

    def make(self, build, compile=None) -> keras.Model:
        import tfparallel

        mesh = tfparallel.Mesh(*self.sizes)
        model = tfparallel.hybrid_parallel(
            build,
            mesh,
            self.devices,
            num_micro_batches=mesh.pipeline,
            balance="memory",
            allow_empty_stages=True,
            **self.options,
            **self.builder_options,
        )
        if compile is not None:
            compile(model)
        return model


FORMS = {form.name: form for form in (Builder, DropIn, Stages, Split, Pipeline)}
HYBRID = "hybrid_parallel"


def form_on(name: str, devices: list[str], size: int | str) -> Plain:
    """A form on as many of the devices, or with a mesh of them."""
    return Hybrid(devices, size) if name == HYBRID else FORMS[name](devices[:size])

SEED = 7

# By these names `observe` tells `run` in which types the layers of the trained model compute.
_COMPUTES_IN = "computes in "
NUMBERED = re.compile(r"^variable_\d+$")  # As Keras names a variable that was given no name.


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Runs the block under a dtype policy and restores what was set before."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64" if dtype == "float64" else "float32")
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def run(case: Case, form: Plain, *, baseline: bool = False) -> Observed:
    """Trains `case` under `form` from its own seed, in its own precision."""
    train = (case.baseline if baseline else None) or case.train or fit
    form.builder_options = {} if baseline else case.options
    keras.backend.clear_session()  # Before the dtype policy is set: it resets that, too.
    with precision(case.dtype):
        keras.utils.set_random_seed(SEED)
        seen = train(form, case)
    computed_in = {name for name in seen if name.startswith(_COMPUTES_IN)}
    if _COMPUTES_IN + case.dtype.removeprefix("mixed_") not in computed_in:
        raise AssertionError(
            f"No layer of '{case.name}' under {form.name} computes in the case's precision, "
            f"{case.dtype}. Received: {sorted(computed_in)}"
        )
    return {name: value for name, value in seen.items() if name not in computed_in}


def on_one_device(case: Case) -> Observed:
    """What `case` is measured with; kept on disk where a session of several processes asks so."""
    folder = os.environ.get(ONE_DEVICE_FOLDER)
    if folder is None:
        return run(case, Plain(), baseline=True)
    path = pathlib.Path(folder, f"{zlib.crc32(case.name.encode())}.pickle")
    if path.exists():
        return pickle.loads(path.read_bytes())
    seen = run(case, Plain(), baseline=True)
    path.write_bytes(pickle.dumps(seen))
    return seen


def fit(form: Plain, case: Case) -> Observed:
    """The default training: six uneven batches of 17, the last of 2, four times.

    87 examples in batches of 17 leave 2 in the last: 9 + 8 and 1 + 1 on two
    replicas, 6 + 6 + 5 and 1 + 1 + 0 on three, 5 + 4 + 4 + 4 and 1 + 1 + 0 + 0 on
    four. Every replica count meets shards of unequal length, and three and four
    meet a replica without an example.
    """
    model = form.model(case)
    history = model.fit(**fit_arguments(case, form))
    return observe(model, history.history)


def of_known_size(x):
    """The same batches, in a data set that says how many they are.

    Plain Keras counts a step more for the end of data of unknown size, an epoch;
    `test_keras_counts_the_end_of_a_generator_as_a_step` shows it. What is compared
    is the steps that had data.
    """
    if inspect.isgenerator(x):
        batches = list(x)
        signature = tf.nest.map_structure(
            lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), batches[0]
        )
        x = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    if isinstance(x, tf.data.Dataset) and x.cardinality() == tf.data.UNKNOWN_CARDINALITY:
        return x.apply(tf.data.experimental.assert_cardinality(sum(1 for _ in x)))
    return x


def fit_arguments(case: Case, form: Plain | None = None) -> dict[str, Any]:
    """Keyword arguments of `fit` for a case: its data, 24 steps, no shuffling."""
    arguments = {"epochs": 4, "verbose": 0} | case.data() | case.fit
    # Placed layers train by Keras's own loop, which counts as it does on one device.
    by_keras = (Plain, Stages, Split, Pipeline, Hybrid)
    if type(form) in by_keras and "steps_per_epoch" not in arguments:
        arguments["x"] = of_known_size(arguments["x"])
    if isinstance(arguments["x"], (np.ndarray, dict, list, tuple)):
        arguments = {"batch_size": 17, "shuffle": False} | arguments
    return arguments


def observe(model: keras.Model, history: dict | None = None, **outputs) -> Observed:
    """Every variable by path, every loss and metric by name, and named outputs.

    Outputs named "weights …" or "slots …" are measured as such. An optimizer that was
    not stepped has no slots to compare: whether they were made before they are needed is
    nobody's result.
    """
    seen: Observed = {}

    def put(kind: str, path: str, value) -> None:
        key, count = f"{kind}:{path}", 2
        while key in seen:
            key, count = f"{kind}:{path}#{count}", count + 1
        seen[key] = np.array(keras.ops.convert_to_numpy(value), dtype="float64")

    for layer in model._flatten_layers(include_self=False):
        if not isinstance(layer, (keras.layers.InputLayer, keras.Model)):
            seen[_COMPUTES_IN + layer.compute_dtype] = np.array(1.0)
    for variable in model.variables:
        # The state of a random generator is how a layer draws, not what it learned.
        if "seed_generator" not in variable.path:
            put("weight", variable.path, variable)
    for optimizer in optimizers_of(model):
        if not int(keras.ops.convert_to_numpy(optimizer.iterations)):
            continue
        for index, (variable, value) in enumerate(slots_of(optimizer)):
            name = NUMBERED.sub("variable", variable.name)
            put("slot", f"{optimizer.name}/{index}/{name}", value)
    for name, values in (history or {}).items():
        put("history", name, values)
    for name, values in outputs.items():
        leaves = keras.tree.flatten(values)
        kind = {"weights": "weight", "slots": "slot"}.get(name.split(" ")[0], "output")
        for index, leaf in enumerate(leaves):
            put(kind, name if len(leaves) == 1 else f"{name}[{index}]", leaf)
    return seen


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer, and those that the model holds as attributes."""
    candidates = [getattr(model, "optimizer", None)]
    candidates += [value for _, value in sorted(vars(model).items(), key=lambda item: item[0])]
    unique = []
    for value in candidates:
        if isinstance(value, keras.optimizers.Optimizer) and not any(value is u for u in unique):
            unique.append(value)
    return unique


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, Any]]:
    """Each variable of an optimizer with the value that a file of it would hold.

    An optimizer's path depends on whether `fit` or `build` made it; order and name do not. (Keras
    numbers a variable without a name by those that were made before it: `NUMBERED`.)
    """
    store: dict[str, np.ndarray] = {}
    optimizer.save_own_variables(store)
    values = [store[key] for key in sorted(store, key=int)]
    if len(values) != len(optimizer.variables):  # A wrapper saves its inner one apart.
        values = optimizer.variables
    return list(zip(optimizer.variables, values, strict=True))


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two values of one name are apart, relative to the larger's scale."""

    name: str
    relative: float


def compare(expected: Observed, seen: Observed) -> list[Difference]:
    """All differences, the largest first.

    Raises:
        AssertionError: Where one side lacks a name or has another shape; such a
            run trained another model.
    """
    missing, surplus = expected.keys() - seen.keys(), seen.keys() - expected.keys()
    if missing or surplus:
        raise AssertionError(
            f"Another set of variables or metrics than on one device. "
            f"Missing: {sorted(missing)}; not on one device: {sorted(surplus)}"
        )
    differences = []
    for name, reference in expected.items():
        value = seen[name]
        if reference.shape != value.shape:
            raise AssertionError(f"{name}: shape {value.shape}, on one device {reference.shape}")
        differences.append(Difference(name, relative_difference(name, reference, value)))
    return sorted(differences, key=lambda difference: -difference.relative)


def relative_difference(name: str, expected: np.ndarray, value: np.ndarray) -> float:
    """max|a - b| / max|a|, with the floor of the name's kind; inf where NaN is new."""
    if expected.size == 0:
        return 0.0
    same = (expected == value) | (np.isnan(expected) & np.isnan(value))
    if same.all():
        return 0.0
    apart = np.max(np.abs(np.where(same, 0.0, value - expected)))
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(finite.max() if finite.size else 0.0, FLOOR[name.split(":")[0]])
    return float(apart / scale) if np.isfinite(apart) else float("inf")
