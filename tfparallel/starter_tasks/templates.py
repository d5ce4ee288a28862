"""The text of the task files that `tfparallel init` writes."""

import dataclasses
import textwrap
from collections.abc import Sequence

from tfparallel.starter_tasks.data_files import (
    DataFile,
    lines_of_images,
    lines_of_series,
    lines_of_table,
    lines_of_text,
)
from tfparallel.starter_tasks.kinds import KINDS


@dataclasses.dataclass(frozen=True)
class _Template:
    """The parts of a task file of one kind.

    Attributes:
        imports: Imports in addition to Keras and NumPy.
        constants: The sample's constants; a data file brings its own.
        layers: The layers of the model, with its input.
        epochs: The number of epochs.
        sample: The code in `load_data` that generates the sample.
        rest: The code in `load_data` that prepares and splits the data.
    """

    constants: str
    layers: str
    epochs: int
    sample: str
    rest: str
    imports: str = ""


_SHUFFLED = """
order = np.random.default_rng(0).permutation(len(x))
train, validation = np.split(order, [len(x) * 4 // 5])
return (x[train], y[train]), (x[validation], y[validation])
"""

_TEMPLATES = {
    "image": _Template(
        constants=lines_of_images((16, 16, 1)) + "NUM_CLASSES = 4\n",
        layers="""
keras.Input(SHAPE),
keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
keras.layers.MaxPooling2D(),
keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
keras.layers.GlobalAveragePooling2D(),
keras.layers.Dense(NUM_CLASSES),
""",
        epochs=10,
        sample="""
# Generated sample data: noisy bars in four directions. Replace it with your own arrays.
random = np.random.default_rng(0)
y = random.integers(NUM_CLASSES, size=2000)
x = random.normal(0.0, 0.3, size=(2000, *SHAPE)).astype("float32")
for image, direction in zip(x[..., 0], y, strict=True):
    place = random.integers(16)
    if direction == 0:
        image[place, :] += 1
    elif direction == 1:
        image[:, place] += 1
    else:
        diagonal = np.eye(16, k=place - 8)
        image += diagonal if direction == 2 else diagonal[::-1]
""",
        rest=_SHUFFLED,
    ),
    "table": _Template(
        constants=lines_of_table(4),
        layers="""
keras.Input((NUM_INPUTS,)),
keras.layers.Dense(64, activation="relu"),
keras.layers.Dense(64, activation="relu"),
keras.layers.Dense({num_outputs}),{scaling}
""",
        epochs=20,
        sample="""
# Generated sample data: a smooth function of four columns. Replace it with your own arrays.
x = np.random.default_rng(0).normal(size=(2000, NUM_INPUTS)).astype("float32")
y = x[:, :1] * x[:, 1:2] + np.sin(x[:, 2:3]) - 0.5 * x[:, 3:]
""",
        rest="""
order = np.random.default_rng(0).permutation(len(x))
train, validation = np.split(order, [len(x) * 4 // 5])
x = (x - x[train].mean(0)) / (x[train].std(0) + 1e-6)
return (x[train], y[train]), (x[validation], y[validation])
""",
    ),
    "text": _Template(
        imports="from pydoc_data.topics import topics\n",
        constants=lines_of_text(),
        layers="""
keras.Input((LENGTH,), dtype="int32"),
keras.layers.Embedding(256, 64),
keras.layers.GRU(128, return_sequences=True),
keras.layers.Dense(256),
""",
        epochs=3,
        sample="""
# Sample data: Python's own documentation. Replace it with your own text.
text = "".join(topics[name] for name in sorted(topics))[:100_000]
""",
        rest="""
codes = np.frombuffer(text.encode(), "uint8").astype("int32")
windows = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
x, y = windows[:, :-1], windows[:, 1:]
"""
        + _SHUFFLED.lstrip(),
    ),
    "series": _Template(
        constants=lines_of_series(48, num_series=1),
        layers="""
keras.Input((LENGTH, NUM_SERIES)),
keras.layers.Conv1D(32, 5, padding="causal", activation="relu"),
keras.layers.GRU(32),
keras.layers.Dense(1),
""",
        epochs=5,
        sample="""
# Generated sample data: noisy daily and weekly cycles. Replace it with your own values.
hours = np.arange(3000)
values = np.sin(2 * np.pi * hours / 24) + 0.5 * np.sin(2 * np.pi * hours / 168)
values += np.random.default_rng(0).normal(0.0, 0.1, size=hours.shape)
""",
        rest="""
values = values.reshape(-1, NUM_SERIES).astype("float32")
end = len(values) * 4 // 5  # Later steps are for validation.
values = (values - values[:end].mean(0)) / (values[:end].std(0) + 1e-6)
windows = np.lib.stride_tricks.sliding_window_view(values, LENGTH + 1, axis=0)
x, y = windows[..., :-1].transpose(0, 2, 1), windows[:, 0, -1:]
return (x[: end - LENGTH], y[: end - LENGTH]), (x[end:], y[end:])
""",
    ),
}

_CLASSES = """\
loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
metrics=["accuracy"],
"""
_NUMBERS = """\
loss="mse",
metrics=["mae"],
"""

_FILE = '''\
"""Predicts {predicts}.

{commands}
"""

{imports}
EPOCHS = {epochs}
{constants}

def build_model():
    return keras.Sequential(
        [
{layers}
        ]
    )


def compile_model(model):
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
{objective}
    )


def load_data():
    """Returns (train, validation), each (x, y) in arrays."""
{load}
'''


def task_file(kind: str, data: DataFile | None, commands: Sequence[str]) -> str:
    """Returns the text of a task file.

    Args:
        kind: The name of one of `KINDS`.
        data: The user's own data; None for a sample.
        commands: The commands shown in its docstring.
    """
    template = _TEMPLATES[kind]
    imports, rest, scaling = ["import keras\nimport numpy as np\n"], template.rest, ""
    if data is None:
        if template.imports:
            imports.insert(0, template.imports)
        classes, constants, load = kind in ("image", "text"), template.constants, template.sample
    else:
        imports.insert(0, data.imports)
        classes, constants, load = data.has_classes or kind == "text", data.constants, data.load
        if data.split is not None:
            rest = data.split
            imports[-1] += "import tensorflow as tf\nfrom keras.utils import FeatureSpace\n"
        if data.scale is not None:
            mean, deviation = data.scale
            constants += f"MEAN, DEVIATION = {mean:g}, {deviation:g}  # Of the target.\n"
            scaling = "\nkeras.layers.Rescaling(DEVIATION, offset=MEAN),"
    num_outputs = "NUM_CLASSES" if classes else "1"
    return _FILE.format(
        predicts=KINDS[kind].predicts,
        commands="\n".join(f"    {command}" for command in commands),
        imports="\n".join(imports),
        epochs=template.epochs,
        constants=constants,
        layers=_indent(template.layers.format(num_outputs=num_outputs, scaling=scaling), 3),
        objective=_indent(_CLASSES if classes else _NUMBERS, 2),
        load=_indent(load.strip("\n") + "\n" + rest.strip("\n"), 1),
    )


def _indent(text: str, depth: int) -> str:
    return textwrap.indent(text.strip("\n"), "    " * depth)
