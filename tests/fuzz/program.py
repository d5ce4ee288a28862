"""A program of the fuzzer: a small value, from which the source of a Keras program is written.

    Program(inputs=(Input("vector", (5,)),), blocks=(Block("layers.Dense(3)"),), ...)

is a model's layers, its heads with their losses, the optimizer, the data and the arguments of
`fit`, all of it as code in strings. It goes to JSON and back, compares, and is as easy to make
smaller as it is to print: `source(program)` is a file that runs by itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import linecache
import re
from typing import Any

from . import users


@dataclasses.dataclass(frozen=True)
class Block:
    """One layer of the chain: how it is made, called, and changed once the model is built.

    In `call`, `{layer}` is the layer and `{x}` the tensor so far; `inputs` is the model's input.
    """

    make: str
    call: str = "{layer}({x})"
    after: str = ""


@dataclasses.dataclass(frozen=True)
class Input:
    """An input: what its array holds (`real`, `ids`, `words`) and the shape of an example."""

    holds: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...] = ()


@dataclasses.dataclass(frozen=True)
class Head:
    """An output: its layers, its loss and metrics, and what its targets hold."""

    blocks: tuple[Block, ...]
    target: str
    shape: tuple[int, ...]
    loss: str
    metrics: tuple[str, ...] = ()
    steps: int = 0  # An output for each of so many steps; 0 for one an example.


@dataclasses.dataclass(frozen=True)
class Program:
    """All that is drawn of a program."""

    inputs: tuple[Input, ...]
    blocks: tuple[Block, ...]
    heads: tuple[Head, ...]
    style: str = "functional"  # or sequential, subclassed, nested
    outputs: str = "list"  # or dict
    start: str = "function"  # what a builder is given; or built, compiled
    optimizer: str = "optimizers.SGD(0.1)"
    compile: str = ""
    feed: str = "arrays"  # or tf.data, endless, PyDataset
    weights: str = ""  # or sample, class
    num_examples: int = 23
    batch_size: int = 9
    fit: str = "epochs=1"
    validation: str = ""
    then: tuple[str, ...] = ()  # evaluate, predict, save, again, on_batch, reload, resume
    replicas: int = 2
    schedule: str = "1f1b"
    step: str = ""  # A class of model with a `train_step` of its own, for the functional style.

    @property
    def has_sequence(self) -> bool:
        """Whether some input is a sequence, of ids or of features."""
        return any(len(value.shape) == 2 or value.holds == "ids" for value in self.inputs)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        def tuples(value):
            if isinstance(value, list):
                return tuple(tuples(each) for each in value)
            return {k: tuples(v) for k, v in value.items()} if isinstance(value, dict) else value

        fields = tuples(json.loads(text))
        fields["blocks"] = tuple(Block(**block) for block in fields["blocks"])
        for name, kind in (("inputs", Input), ("heads", Head)):
            fields[name] = tuple(
                kind(**{**each, "blocks": tuple(Block(**block) for block in each["blocks"])})
                for each in fields[name]
            )
        return cls(**fields)


IMPORTS = """\
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, metrics, ops, optimizers

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
"""


def source(program: Program) -> str:
    """The program as Python: build_model, compile_model, load_data, train."""
    body = "\n\n\n".join([_build(program), _compile(program), _load_data(program), _train(program)])
    used = []
    for name, value in reversed(vars(users).items()):
        text = "\n".join([*used, body])  # A class may extend another.
        if getattr(value, "__module__", "") == users.__name__ and re.search(rf"\b{name}\b", text):
            used.insert(0, inspect.getsource(value))
    return "\n\n".join([IMPORTS, *(text.strip() + "\n" for text in used), body]) + "\n"


_numbers = itertools.count()


def load(program: Program) -> dict[str, Any]:
    """Runs the source and returns its names; tracebacks and AutoGraph can read it."""
    text = source(program)
    file = f"<fuzz {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = {"__name__": "fuzz_program"}
    exec(compile(text, file, "exec"), names)
    return names


class _Lines:
    """Writes blocks: a line that makes the layer, a line that calls it, or one for both."""

    def __init__(self, prefix: str = "", apart: bool = False):
        self.make, self.call, self.after = [], [], []
        self.prefix, self.apart, self.number = prefix, apart, 0

    def chain(self, blocks: tuple[Block, ...], x: str = "x") -> None:
        for block in blocks:
            self.number += 1
            layer = f"{self.prefix}layer{self.number}"
            if not self.apart and block.call == "{layer}({x})" and not block.after:
                self.call.append(f"{x} = {block.make}({x})")
                continue
            self.make.append(f"{layer} = {block.make}")
            self.call.append(f"{x} = {block.call.format(layer=layer, x=x)}")
            if block.after:
                self.after.append(block.after.format(layer=layer))


def _indented(lines: list[str], by: int = 4) -> str:
    return "\n".join(" " * by + line for line in lines)


def _dict(names: list[str], values: list[str]) -> str:
    return "{" + ", ".join(f'"{n}": {v}' for n, v in zip(names, values, strict=True)) + "}"


def _input(value: Input, name: str) -> str:
    dtype = {"ids": ', dtype="int64"', "words": ', dtype="string"'}.get(value.holds, "")
    return f'{name} = keras.Input({value.shape}{dtype}, name="{name}")'


def _names(program: Program) -> list[str]:
    return (
        ["inputs"]
        if len(program.inputs) == 1
        else [f"inputs{index}" for index in range(len(program.inputs))]
    )


def head_names(program: Program) -> list[str]:
    return [f"head{index}" for index in range(len(program.heads))]


def _graph(program: Program, lines: _Lines) -> None:
    """From the inputs' names to the heads' names."""
    names = _names(program)
    tensors = ["x"] if len(names) == 1 else [f"x{index}" for index in range(len(names))]
    for name, x, value in zip(names, tensors, program.inputs, strict=True):
        lines.call.append(f"{x} = {name}")
        lines.chain(value.blocks, x)
    if len(names) > 1:
        lines.call.append(f"x = layers.concatenate([{', '.join(tensors)}])")
    if program.style == "nested":
        lines.call.append("x = encoder(x.shape[1:])(x)")
    else:
        lines.chain(program.blocks)
    if len(program.heads) == 1:
        lines.chain(program.heads[0].blocks)
        return
    for name, head in zip(head_names(program), program.heads, strict=True):
        lines.call.append(f"{name} = x")
        lines.chain(head.blocks, name)


def _outputs(program: Program) -> str:
    names = head_names(program) if len(program.heads) > 1 else ["x"]
    if program.outputs == "dict":
        return _dict(names, names)
    return names[0] if len(names) == 1 else "[" + ", ".join(names) + "]"


def _build(program: Program) -> str:
    subclassed = program.style == "subclassed"
    lines = _Lines("self." if subclassed else "", subclassed or program.style == "sequential")
    names = _names(program)
    inputs = names[0] if len(names) == 1 else "[" + ", ".join(names) + "]"
    if program.style == "sequential":
        (value,), (head,) = program.inputs, program.heads
        lines.chain((*value.blocks, *program.blocks, *head.blocks))
        layers = ", ".join(line.split(" = ")[0] for line in lines.make)
        return "def build_model():\n" + _indented(
            [
                _input(value, "inputs"),
                *lines.make,
                f"model = keras.Sequential([inputs, {layers}])",
                *lines.after,
                "return model",
            ]
        )
    if subclassed:
        _graph(program, lines)
        text = '@keras.saving.register_keras_serializable("fuzz")\nclass Net(keras.Model):\n'
        text += "    def __init__(self, **kwargs):\n"
        text += _indented(["super().__init__(**kwargs)", *lines.make], 8)
        text += "\n\n    def call(self, inputs):\n"
        unpacked = [f"{inputs} = inputs"] if len(names) > 1 else []
        text += _indented([*unpacked, *lines.call, f"return {_outputs(program)}"], 8)
        return text + "\n\n\ndef build_model():\n    return Net()"
    _graph(program, lines)
    kind = program.step or "keras.Model"
    model = [f"model = {kind}({inputs}, {_outputs(program)})", *lines.after, "return model"]
    keras_inputs = [_input(value, name) for name, value in zip(names, program.inputs, strict=True)]
    text = "def build_model():\n" + _indented([*keras_inputs, *_merged(lines), *model])
    return text if program.style != "nested" else _encoder(program.blocks) + "\n\n\n" + text


def _encoder(blocks: tuple[Block, ...]) -> str:
    """The blocks as a model of their own, which `build_model` calls."""
    lines = _Lines()
    lines.chain(blocks)
    return "def encoder(shape):\n" + _indented(
        [
            "start = x = keras.Input(shape)",
            *_merged(lines),
            'model = keras.Model(start, x, name="encoder")',
            *lines.after,
            "return model",
        ]
    )


def _merged(lines: _Lines) -> list[str]:
    """Each layer made right before it is called."""
    makes, merged = list(lines.make), []
    for call in lines.call:
        while makes and re.search(rf"\b{re.escape(makes[0].split(' = ')[0])}\b", call):
            merged.append(makes.pop(0))
        merged.append(call)
    return merged + makes


def _compile(program: Program) -> str:
    names, losses = head_names(program), [head.loss for head in program.heads]
    metrics = [f"[{', '.join(head.metrics)}]" for head in program.heads]
    if program.outputs == "dict":
        loss, metric = _dict(names, losses), _dict(names, metrics)
    elif len(names) > 1:
        loss, metric = f"[{', '.join(losses)}]", f"[{', '.join(metrics)}]"
    else:
        loss, metric = losses[0], metrics[0]
    arguments = [f"optimizer={program.optimizer}", f"loss={loss}"]
    if any(head.metrics for head in program.heads):
        kind = "weighted_metrics" if "weighted_metrics" in program.compile else "metrics"
        arguments.append(f"{kind}={metric}")
    if rest := program.compile.replace("weighted_metrics", "").strip(", "):
        arguments.append(rest)
    return (
        "def compile_model(model):\n    model.compile(\n"
        + _indented([f"{argument}," for argument in arguments], 8)
        + "\n    )"
    )


def _array(holds: str, shape: tuple[int, ...]) -> str:
    size = ", ".join(["n", *map(str, shape)])
    return {
        "real": f"rng.normal(size=({size}))",
        "positive": f"rng.uniform(0.1, 2.0, size=({size}))",
        "ids": f"rng.integers(0, 9, size=({size},))",
        "words": f"tf.constant(rng.choice(list('abcdef'), size=({size},)).tolist())",
        "binary": f"rng.integers(0, 2, size=({size})).astype('float64')",
        "signs": f"2.0 * rng.integers(0, 2, size=({size})) - 1.0",
        "labels": f"rng.integers(0, 4, size=({size},))",
        "one_hot": f"np.eye(4)[rng.integers(0, 4, size=({size},))]",
    }[holds]


def _load_data(program: Program) -> str:
    lines = ["rng = np.random.default_rng(3)"]
    xs = [_array(value.holds, value.shape) for value in program.inputs]
    ys = [_array(head.target, head.shape) for head in program.heads]
    # A row without a token would have a mean over none.
    for index, value in enumerate(program.inputs):
        if value.holds == "ids" and value.shape[-1] > 1:
            xs[index] = f"np.concatenate([{xs[index]}[:, :-1], np.ones((n, 1), int)], axis=1)"
    lines.append(f"x = {xs[0]}" if len(xs) == 1 else f"x = [{', '.join(xs)}]")
    names = head_names(program)
    if program.outputs == "dict":
        lines.append(f"y = {_dict(names, ys)}")
    else:
        lines.append(f"y = {ys[0]}" if len(ys) == 1 else f"y = [{', '.join(ys)}]")
    if program.weights == "sample":
        sizes = [f"(n, {head.steps})" if head.steps else "n" for head in program.heads]
        weights = [f"rng.choice([0.0, 0.5, 1.0, 2.0], size={size})" for size in sizes]
        if program.outputs == "dict":
            text = _dict(names, weights)
        else:
            text = weights[0] if len(names) == 1 else f"[{', '.join(weights)}]"
        lines.append(f"return x, y, {text}")
    else:
        lines.append("return x, y")
    return f"def load_data(n={program.num_examples}):\n" + _indented(lines)


def _train(program: Program) -> str:
    size = program.batch_size
    steps = -(-program.num_examples // size)
    lines = ["data = load_data()"]
    arrays = "*data[:2], sample_weight=data[2]" if program.weights == "sample" else "*data"
    fit = [f"{program.fit}, verbose=0"]
    if program.feed == "arrays":
        fit = [f"{arrays}, batch_size={size}, shuffle=False", *fit]
    elif program.feed == "PyDataset":
        fit = [f"Batches(data, {size})", "shuffle=False", *fit]
    else:
        packed = "(tuple(data[0]), *data[1:])" if len(program.inputs) > 1 else "data"
        if program.outputs == "list" and len(program.heads) > 1:
            rest = ", tuple(data[2])" if program.weights == "sample" else ""
            packed = f"({packed}[0], tuple(data[1]){rest})"
        lines.append(f"dataset = tf.data.Dataset.from_tensor_slices({packed}).batch({size})")
        if program.feed == "endless":
            lines.append("dataset = dataset.repeat()")
            fit.append(f"steps_per_epoch={max(1, steps - 1)}")
        fit = ["dataset", *fit]
    if program.weights == "class":
        fit.append("class_weight={0: 0.5, 1: 2.0, 2: 1.0, 3: 0.3}")
    if program.validation:
        fit.append(program.validation)
    lines.append(f"history = model.fit({', '.join(fit)})")
    seen = ['"history": history.history']
    if "again" in program.then:
        lines.append(f"again = model.fit({', '.join(fit)})")
        seen.append('"again": again.history["loss"]')
    if "reload" in program.then:
        lines += [
            "with tempfile.TemporaryDirectory() as folder:",
            '    path = os.path.join(folder, "model.weights.h5")',
            "    model.save_weights(path)",
            f"    model.fit({', '.join(fit)})",
            "    model.load_weights(path)",
            f"reloaded = model.fit({', '.join(fit)})",
        ]
        seen.append('"reloaded": reloaded.history["loss"]')
    if "on_batch" in program.then:
        lines.append("head = keras.tree.map_structure(lambda array: array[:3], data)")
        seen.append('"on batch": [model.train_on_batch(*head), model.test_on_batch(*head)]')
    if "evaluate" in program.then:
        scores = f"model.evaluate({arrays}, batch_size={size}, verbose=0, return_dict=True)"
        seen.append(f'"scores": {scores}')
    if "predict" in program.then:
        seen.append(f'"predictions": model.predict(data[0], batch_size={size + 2}, verbose=0)')
    lines.append(f"return {{{', '.join(seen)}}}")
    return "def train(model):\n" + _indented(lines)
