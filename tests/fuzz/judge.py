"""Trains a program on one device and under a form, and says what became of it.

    exact         as one device: no further from it than rounding carries the program
    refused       an error of ours, which says what it received
    silent        other results, and no word
    crash         any other error

How far rounding carries a program is measured: one device trains it a second time, its first
weights and all that its layers put out moved by one unit in the last place. A value may be `SLACK`
times as far off. (Moved weights alone do not tell: the windows of a convolution over two equal
tokens are equal whatever the weights are, and how many rows a product has decides which of them
is the maximum. It matters where Keras squares an embedding's gradients one by one.) One such
training may miss what comes in jumps: `NUM_MOVED` are made before a difference is believed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import traceback
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.parity.case import (
    SEED,
    Builder,
    DropIn,
    Hybrid,
    Observed,
    Pipeline,
    Plain,
    Split,
    Stages,
    observe,
    precision,
    relative_difference,
)
from tests.parity.table import first_sentence
from tfparallel.replication import sharding
from tfparallel.seams.keras import NAME_NUMBERS, set_global

from .program import Program, load, source

EXACT, REFUSED, SILENT, CRASH = "exact", "refused", "silent", "crash"
SHARED_OPTIMIZER, SHARED_PARAMETERS = "shard=optimizer", "shard=parameters"
SEQUENCE = "sequence"
FORMS = (
    "data_parallel",
    "MirroredStrategy",
    "model_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "hybrid_parallel",
    SHARED_OPTIMIZER,
    SHARED_PARAMETERS,
    SEQUENCE,
)
PACKAGE = os.path.dirname(tfparallel.__file__) + os.sep
FOUR = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
SLACK, SMALLEST, NUM_MOVED = 100.0, 1e-9, 5
# Keras's LoRA has weights of float32 whatever the policy is; the tolerance is that of parity.
IN_FLOAT32, SMALLEST_IN_FLOAT32 = re.compile(r"enable_lora"), 1e-4


class Discarded(Exception):
    """One device does not train the program, or to numbers that say nothing."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program under a form."""

    form: str
    verdict: str
    detail: str = ""
    relative: float = 0.0

    @property
    def is_finding(self) -> bool:
        return self.verdict in (SILENT, CRASH)

    @property
    def family(self) -> str:
        """The same for findings that look like one cause."""
        text = re.sub(r"'[^']*'|\d+(\.\d+)?(e-?\d+)?|<[^>]*>", "…", self.detail)
        return f"{self.verdict}: {text[:160]}" if self.verdict == CRASH else self.verdict


class Sharded(Builder):
    """`tfparallel.data_parallel` whose replicas share something out."""

    def __init__(self, devices: list[str], shard: str):
        super().__init__(devices)
        self.name, self.builder_options = f"shard={shard}", {"shard": shard}


@contextlib.contextmanager
def sharing_small_weights() -> Iterator[None]:
    """Has `shard="parameters"` share out whatever has two elements: a program's weights are small.

    Else nothing is shared out that has fewer than 4,096.
    """
    before, sharding._FEWEST = sharding._FEWEST, 2
    try:
        yield
    finally:
        sharding._FEWEST = before


def form_of(name: str, program: Program) -> Plain:
    devices = [f"CPU:{index}" for index in range(program.replicas)]
    return {
        "data_parallel": lambda: Builder(devices),
        "MirroredStrategy": lambda: DropIn(devices),
        "model_parallel": lambda: Stages(devices[:2]),
        "tensor_parallel": lambda: Split(devices[:2]),
        "pipeline_parallel": lambda: Pipeline(
            devices[:2], program.schedule, num_micro_batches=num_micro_batches(program)
        ),
        "hybrid_parallel": lambda: hybrid(program, mesh_of(program)),
        SHARED_OPTIMIZER: lambda: shared_optimizer(program, devices),
        SHARED_PARAMETERS: lambda: Sharded(devices, "parameters"),
        SEQUENCE: lambda: hybrid(program, sequence_mesh_of(program)),
    }[name]()


def shared_optimizer(program: Program, devices: list[str]) -> Plain:
    """Replicas of the model; or, of as many as four devices, of layers in two parts."""
    if program.replicas < 4:
        return Sharded(devices, "optimizer")
    return hybrid(program, (2, 1, 2), shard="optimizer")


def hybrid(program: Program, mesh: tuple[int, ...], **options) -> Plain:
    sizes = " x ".join(map(str, mesh))
    return Hybrid(FOUR, sizes, schedule=schedule_of(program, mesh), **options)


def schedule_of(program: Program, mesh: tuple[int, ...]) -> str:
    """The program's; of one stage it is none, and nothing alternates."""
    return program.schedule if mesh[1] > 1 else "1f1b"


def mesh_of(program: Program) -> tuple[int, ...]:
    """Two replicas of two stages, of layers or of sequences in two parts: by what else it draws."""
    return {2: (2, 1, 2), 3: (2, 2, 1), 4: (2, 1, 1, 2)}[program.replicas]


def sequence_mesh_of(program: Program) -> tuple[int, ...]:
    """Sequences in two or three parts; with two replicas; or with two stages."""
    if program.replicas == 2 and program.schedule == "gpipe":
        return (1, 2, 1, 2)
    return {2: (1, 1, 1, 2), 3: (1, 1, 1, 3), 4: (2, 1, 1, 2)}[program.replicas]


def fits(form: str, program: Program) -> bool:
    """Whether a form has anything to do with a program: a mesh divides sequences alone."""
    return form != SEQUENCE or program.has_sequence


def num_micro_batches(program: Program) -> int:
    """As many as the last batch has examples for: 2 at least, 4 at most, an even number."""
    return 4 if 4 <= (program.num_examples % program.batch_size or program.batch_size) else 2


def train(program: Program, form: Plain, moves: int | None = None) -> Observed:
    """Trains the program from its seed and returns what is compared, by name.

    `moves` seeds the directions in which all is moved by one unit; without, nothing is.
    """
    keras.backend.clear_session()
    with precision("float64"), sharing_small_weights():
        keras.utils.set_random_seed(SEED)
        names = load(program)
        build, compile_model = names["build_model"], names["compile_model"]
        if program.start == "function" or isinstance(form, DropIn):
            model = form.make(build, compile_model)
        else:
            original = build()
            if program.start == "compiled":
                compile_model(original)
            model = original if type(form) is Plain else form.make(original)
            if program.start == "built":
                compile_model(model)
        if moves is not None:
            move_by_one_unit(model, names["load_data"]()[0], moves)
            round_otherwise(model, moves)
        seen = names["train"](model)
        history = seen.pop("history")
        if "resume" in program.then:
            model = resumed(model, program, form)
            seen |= {f"resumed {name}": value for name, value in names["train"](model).items()}
        if "save" in program.then:
            seen["predictions of the file"] = saved_and_loaded(model, form, names["load_data"]()[0])
        return observe(model, history, **seen)


def move_by_one_unit(model: keras.Model, x, seed: int) -> None:
    """Moves each trainable weight by one unit in the last place, up or down."""
    if not model.built:
        model(keras.tree.map_structure(lambda array: keras.ops.convert_to_tensor(array[:2]), x))
    up_or_down = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        value = np.asarray(variable)
        towards = up_or_down.choice([-np.inf, np.inf], size=value.shape)
        variable.assign(np.where(value == 0, value, np.nextafter(value, towards)))


def round_otherwise(model: keras.Model, seed: int) -> None:
    """Moves what each layer puts out by one unit in the last place, up or down; zeros stay."""

    def moved(output):
        if not isinstance(output, tf.Tensor) or not output.dtype.is_floating:
            return output
        dtype = output.dtype
        up_or_down = tf.sign(tf.random.stateless_normal(tf.shape(output), [seed, 0], dtype=dtype))
        return output * (1 + np.finfo(dtype.as_numpy_dtype).eps * up_or_down)

    def moving(call):
        return lambda *inputs, **options: keras.tree.map_structure(moved, call(*inputs, **options))

    for layer in model._flatten_layers(include_self=False):
        if not layer._layers:
            layer.call = moving(layer.call)


def resumed(model: keras.Model, program: Program, form: Plain) -> keras.Model:
    """The model of a file that it wrote, its optimizer's state included, under the form again."""
    with form.directory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        # Layers that others make when they are built are numbered anew, alike under every form.
        set_global(NAME_NUMBERS, collections.defaultdict(int))
        if program.start == "function" or isinstance(form, DropIn):
            return form.make(lambda: keras.models.load_model(path))
        loaded = keras.models.load_model(path)
        return loaded if type(form) is Plain else form.make(loaded)


def saved_and_loaded(model: keras.Model, form: Plain, x):
    with form.directory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        return keras.models.load_model(path).predict(x, batch_size=8, verbose=0)


@dataclasses.dataclass
class OneDevice:
    """What one device sees of a program, and how far from it a value may be.

    The rounding is measured when a value is further away than `smallest`: seldom.
    """

    program: Program
    expected: Observed
    moved: list[Observed] = dataclasses.field(default_factory=list)

    @classmethod
    def train(cls, program: Program) -> OneDevice:
        """Trains the program.

        Raises:
            Discarded: If Keras fails, or the numbers are none.
        """
        try:
            expected = train(program, Plain())
        except Exception as error:  # noqa: BLE001  (whatever it says, there is no program)
            text = first_sentence(str(error))[:150]
            raise Discarded(f"{type(error).__name__}: {text}") from error
        for name, value in expected.items():
            if not name.startswith("history") and not np.all(np.abs(value) < 1e8):
                raise Discarded("Training diverges.")
        return cls(program, expected)

    @property
    def smallest(self) -> float:
        """The difference that is rounding in any program of this precision."""
        return SMALLEST_IN_FLOAT32 if IN_FLOAT32.search(source(self.program)) else SMALLEST

    def beyond(self, seen: Observed) -> dict[str, float]:
        """The values of `seen` that are further away than rounding carries them."""
        limits = dict.fromkeys(self.expected, self.smallest)
        differences = beyond(self.expected, seen, limits)
        for number in range(NUM_MOVED):
            if not differences:
                break
            if number == len(self.moved):
                self.moved.append(train(self.program, Plain(), moves=number))
            apart = beyond(self.expected, self.moved[number], dict.fromkeys(limits, 0.0))
            for name, relative in apart.items():
                limits[name] = max(limits.get(name, 0.0), SLACK * relative + self.smallest)
            differences = beyond(self.expected, seen, limits)
        return differences


def judge(form: str | Plain, one_device: OneDevice) -> Outcome:
    """Trains the program under a form, or a form's name, and compares."""
    program, expected = one_device.program, one_device.expected
    named = isinstance(form, str)
    name = form if named else form.name

    def make() -> Plain:
        return form_of(name, program) if named else form

    try:
        seen = train(program, make())
        differences = one_device.beyond(seen)
    except Exception as error:  # noqa: BLE001  (which errors are good ones is what is judged)
        return of_error(name, error)
    if differences:
        largest = sorted(differences, key=lambda key: -differences[key])[:4]
        detail = ", ".join(f"{key}: {differences[key]:.1e}" for key in largest)
        return Outcome(name, SILENT, detail, differences[largest[0]])
    apart = [relative_difference(key, value, seen[key]) for key, value in expected.items()]
    return Outcome(name, EXACT, relative=max(apart))


def beyond(expected: Observed, seen: Observed, limits: dict[str, float]) -> dict[str, float]:
    """The values that are further apart than they may be; infinity for one that is missing."""
    apart = dict.fromkeys(expected.keys() ^ seen.keys(), float("inf"))
    for name in expected.keys() & seen.keys():
        if expected[name].shape != seen[name].shape:
            apart[f"{name} of shape {expected[name].shape}, now {seen[name].shape}"] = float("inf")
            continue
        relative = relative_difference(name, expected[name], seen[name])
        if relative > limits.get(name, SMALLEST):
            apart[name] = relative
    return apart


def of_error(form: str, error: Exception) -> Outcome:
    """A refusal, if the error is ours and says what it received."""
    text = first_sentence(str(error))[:400]
    places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = any(place.startswith(PACKAGE) for place in places[-3:])
    plain = isinstance(error, (ValueError, RuntimeError)) and not isinstance(
        error, tf.errors.OpError
    )
    if plain and ours and "Received:" in str(error):
        return Outcome(form, REFUSED, text)
    return Outcome(form, CRASH, f"{type(error).__name__}: {text}")
