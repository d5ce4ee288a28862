"""Inspects a user's data file, and generates the code that reads it, for `tfparallel init`."""

import csv
import dataclasses
import json
import os
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

_MOST_CLASSES = 100
_ENCODING = "utf-8-sig"  # UTF-8, without the byte order mark that Excel writes.
_OTHER_DELIMITERS = {";": "';'", "\t": "tabs", "|": "'|'"}


# Features are numbered: Keras may not accept a column's name.
_OF_COLUMNS = {
    "NUMBERS": ("number", "[[float(row[name])] for row in rows]", "float_normalized"),
    "WORDS": ("word", "[[row[name]] for row in rows]", "string_categorical"),
}
_UNKNOWN = "[UNK]"  # FeatureSpace's token for an unknown word.
_SHUFFLE = "rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]\n"
_FEATURES = """
space = FeatureSpace(features, output_mode="concat")
end = len(rows) * 4 // 5  # Later rows are for validation: do not adapt to them.
space.adapt(tf.data.Dataset.from_tensor_slices({name: v[:end] for name, v in columns.items()}))
x = np.array(space({name: np.array(values) for name, values in columns.items()}))
return (x[:end], y[:end]), (x[end:], y[end:])
"""


class DataFileError(ValueError):
    """A data file that does not suit the task; the text says what is required."""


@dataclasses.dataclass(frozen=True)
class DataFile:
    """The generated code for a data file.

    Attributes:
        summary: A summary of its content.
        imports: The imports of the code.
        constants: The constants that the model needs.
        load: The code that reads it.
        has_classes: Whether the targets are classes.
        split: The code that returns the rows for training and validation; None for the template's.
        scale: Mean and deviation of numeric targets; None if the model does not need them.
    """

    summary: str
    imports: str
    constants: str
    load: str
    has_classes: bool
    split: str | None = None
    scale: tuple[float, float] | None = None


def read_data_file(kind: str, path: str, task_path: str, target: str | None) -> DataFile:
    """Inspects a data file.

    Args:
        kind: "image", "table", "text" or "series".
        path: The path of an existing file.
        task_path: The path of the task file, which refers to the data by a relative path.
        target: The column of a .csv file to predict; None for the last of a table, and the first
            of a series.

    Raises:
        DataFileError: If its content does not suit the kind.
    """
    relative_path = os.path.relpath(path, os.path.dirname(os.path.abspath(task_path)))
    named = f"DATA = pathlib.Path(__file__).parent / {relative_path!r}\n"
    try:
        if kind == "text":
            return _text(path, named)
        if path.endswith(".csv"):
            return _csv(kind, path, named, target)
        return _npz(kind, path, named)
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"The data file cannot be read: {error}. Received: {path}.") from error


def lines_of_images(shape: Sequence[int]) -> str:
    """Returns the constants of a task on images of shape (height, width, channels)."""
    return f"SHAPE = {tuple(shape)}  # Height, width, channels.\n"


def lines_of_table(num_inputs: int) -> str:
    """Returns the constants of a task on `num_inputs` numeric columns."""
    return f"NUM_INPUTS = {num_inputs}\n"


def lines_of_text() -> str:
    """Returns the constants of a task on a text."""
    return "LENGTH = 64  # Characters that the model reads at a time.\n"


def lines_of_series(length: int, num_series: int) -> str:
    """Returns the constants of a task on series; the model looks back `length` steps."""
    return f"LENGTH = {length}  # Steps that the model looks back.\nNUM_SERIES = {num_series}\n"


def _text(path, named) -> DataFile:
    with open(path, encoding=_ENCODING) as file:
        length = len(file.read())
    if length < 1000:
        raise DataFileError(
            f"The text must have at least 1,000 characters. Received: {length} in --data={path}."
        )
    constants = named + lines_of_text()
    load = f'text = DATA.read_text(encoding="{_ENCODING}")\n'
    return DataFile(f"{length:,} characters", "import pathlib\n", constants, load, False)


def _npz(kind, path, named) -> DataFile:
    arrays = _arrays(path, ("x",) if kind == "series" else ("x", "y"))
    x = arrays["x"]
    ndims = {"image": (3, 4), "table": (2,), "series": (1, 2)}[kind]
    if x.ndim not in ndims or x.dtype.kind not in "biuf" or len(x) < 2:
        raise DataFileError(
            f"With --kind={kind}, x must be a numeric array with {' or '.join(map(str, ndims))} "
            f"axes and at least two examples. Received: x of shape {x.shape} and type {x.dtype} in "
            f"{path}."
        )
    imports = "import pathlib\n"
    if kind == "series":
        constants = named + _series_constants(x.shape[1] if x.ndim == 2 else 1, len(x))
        load = 'with np.load(DATA) as arrays:\n    values = arrays["x"]\n'
        return DataFile(f"{len(x):,} steps", imports, constants, load, False)
    y = arrays["y"]
    if y.shape not in ((len(x),), (len(x), 1)) or y.dtype.kind not in "biuf":
        raise DataFileError(
            f"y must hold one number for each of the {len(x)} examples in x. Received: y of shape "
            f"{y.shape} and type {y.dtype} in {path}."
        )
    has_classes = y.dtype.kind in "biu" and y.min() >= 0 and y.max() < _MOST_CLASSES
    if kind == "image" and not has_classes:
        raise DataFileError(
            f"y must hold classes, whole numbers from 0 to {_MOST_CLASSES - 1}. Received: y of "
            f"type {y.dtype}, from {y.min()} to {y.max()}, in {path}."
        )
    load = 'with np.load(DATA) as arrays:\n    x, y = arrays["x"].astype("float32"), arrays["y"]\n'
    constants, scale = named, None
    if kind == "image":
        constants += lines_of_images((*x.shape[1:], 1)[:3])
        load += "x = x.reshape(-1, *SHAPE)" + (" / 255\n" if x.dtype == np.uint8 else "\n")
    else:
        constants += lines_of_table(x.shape[1])
    if has_classes:
        constants += f"NUM_CLASSES = {int(y.max()) + 1}\n"
        load += 'y = y.reshape(-1).astype("int32")\n'
    else:
        load += 'y = y.reshape(-1, 1).astype("float32")\n'
        scale = _scale_of(y)
    summary = f"{len(x):,} examples"
    return DataFile(summary, imports, constants, load, has_classes, scale=scale)


def _arrays(path, needed) -> dict[str, np.ndarray]:
    write = f"np.savez({path!r}, {', '.join(f'{name}={name}' for name in needed)})"
    if not zipfile.is_zipfile(path):
        size = os.path.getsize(path)
        what = (
            f"a file of {size:,} bytes that is damaged or has another format" if size else "empty"
        )
        raise DataFileError(
            f"The data must be a .npz file, as written by NumPy. Received: --data={path}, {what}. "
            f"Write it: {write}"
        )
    arrays = {}
    try:
        with np.load(path) as file:
            if missing := [name for name in needed if name not in file.files]:
                raise DataFileError(
                    f"The arrays {' and '.join(needed)} are required. Received: --data={path} with "
                    f"{', '.join(sorted(file.files)) or 'none'}; missing: {', '.join(missing)}. "
                    f"Write them: {write}"
                )
            for name in needed:
                arrays[name] = np.asarray(file[name])
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataFileError(
            f"The data file is damaged: {error}. Received: --data={path}. Write it again: {write}"
        ) from error
    except DataFileError:
        raise
    except ValueError as error:
        # The array holds Python objects, which only pickle can read.
        name = next(name for name in needed if name not in arrays)
        raise DataFileError(
            "The arrays must hold numbers; Python objects are pickled, and loading a pickle could "
            f"run arbitrary code. Received: --data={path}, with objects in {name}. Convert it, for "
            f"example with {name}.astype('float32'), and write it again: {write}"
        ) from error
    return arrays


def _rows(path) -> tuple[list[str], list[dict[str, str]]]:
    """Returns the names in a .csv file's first line, and its rows."""
    with open(path, newline="", encoding=_ENCODING) as file:
        reader = csv.DictReader(file)
        try:
            rows, names = [], list(reader.fieldnames or [])
            _check_delimiter(path, names)
            for row in reader:
                values = [value for name, value in row.items() if name is not None]
                number = sum(value is not None for value in values) + len(row.get(None, ()))
                if number != len(names):
                    raise DataFileError(
                        "Each line must have as many fields as the first. Received: "
                        f"--data={path}, where line {reader.line_num} has {number} of {len(names)} "
                        "fields."
                    )
                rows.append(row)
        except csv.Error as error:
            raise DataFileError(
                f"Line {reader.line_num} cannot be read: {error}. Received: --data={path}."
            ) from error
    return names, rows


def _check_delimiter(path, names) -> None:
    used = next((sign for sign in _OTHER_DELIMITERS if len(names) == 1 and sign in names[0]), None)
    if used is not None:
        raise DataFileError(
            f"Columns must be separated by commas, but this file uses {_OTHER_DELIMITERS[used]}. "
            f"Received: --data={path}, whose first line is {names[0]!r}. Write it again with "
            "commas, and with decimal points."
        )


def _csv(kind, path, named, target) -> DataFile:
    names, rows = _rows(path)
    of_numbers = [name for name in names if _are_numbers(rows, name, path)]
    chosen = target
    if chosen is None and names:
        chosen = names[-1] if kind == "table" else next(iter(of_numbers), None)
    # A column of many different texts, such as names or notes, does not generalize to new rows.
    of_words = [
        name
        for name in names
        if name not in of_numbers and len({row[name] for row in rows}) <= _MOST_CLASSES
    ]
    inputs = [name for name in names if name != chosen and name in (*of_numbers, *of_words)]
    if len(rows) < 2 or chosen not in names or (kind == "table" and not inputs):
        raise DataFileError(
            "The file must have a header line, at least two rows, a column to predict and another "
            f"column, which holds numbers or at most {_MOST_CLASSES} distinct texts. Received: "
            f"--data={path} with {len(rows)} rows, columns {names}, --target={target}."
        )
    read = f'with open(DATA, newline="", encoding="{_ENCODING}") as file:\n'
    read += "    rows = list(csv.DictReader(file))\n"
    if kind == "series":
        if chosen not in of_numbers:
            raise DataFileError(f"The column must hold numbers. Received: --target={chosen}.")
        columns = [chosen, *(name for name in inputs if name in of_numbers)]
        constants = f"{named}COLUMNS = {_list_literal(columns)}  # The first is predicted.\n"
        constants += _series_constants(len(columns), len(rows))
        read += "values = np.array([[float(row[name]) for name in COLUMNS] for row in rows])\n"
        summary = f"{len(rows):,} steps of {chosen}"
        return DataFile(summary, "import csv\nimport pathlib\n", constants, read, False)
    numbers = [name for name in inputs if name in of_numbers]
    words = [name for name in inputs if name in of_words]
    table = _table(rows, chosen, chosen in of_numbers, numbers, words)
    if table is None:
        raise DataFileError(
            f"The column to predict must hold numbers, or at most {_MOST_CLASSES} classes. "
            f"Received: --target={chosen} with {len({row[chosen] for row in rows})} distinct texts."
        )
    left_out = [name for name in names if name not in inputs and name != chosen]
    if left_out:
        many = f"; left out, with more than {_MOST_CLASSES} distinct texts: "
        table = dataclasses.replace(table, summary=table.summary + many + ", ".join(left_out))
    return dataclasses.replace(table, constants=named + table.constants, load=read + table.load)


def _table(rows, target, is_number, numbers, words) -> DataFile | None:
    """Returns the code for a table; None if its target is neither a number nor a class."""
    texts = [row[target] for row in rows]
    classes = sorted(set(texts))
    is_whole = all(text.strip().lstrip("-").isdigit() for text in classes)
    has_classes = len(classes) <= _MOST_CLASSES and (is_whole or not is_number)
    if not has_classes and not is_number:
        return None
    # The same split as in the task file: validation rows must not shape the features.
    order = np.random.default_rng(0).permutation(len(rows))
    training_rows = [rows[i] for i in order[: len(rows) * 4 // 5]]
    vocabularies = [{row[name] for row in training_rows} - {_UNKNOWN} for name in words]
    num_inputs = len(numbers) + sum(len(texts) + 1 for texts in vocabularies)
    constants = f"TARGET = {_quoted(target)}\n"
    if numbers:
        constants += f"NUMBERS = {_list_literal(numbers)}\n"
    if words:
        constants += f"WORDS = {_list_literal(words)}  # With few distinct values.\n"
    about = "  # One for each number and each word, and one for unknown words."
    constants += f"NUM_INPUTS = {num_inputs}{about if words else ''}\n"
    load, scale = _SHUFFLE, None
    load += "columns, features = {}, {}\n"
    for listed, names in (("NUMBERS", numbers), ("WORDS", words)):
        if names:
            noun, values, feature = _OF_COLUMNS[listed]
            load += f"for i, name in enumerate({listed}):\n"
            load += f'    columns[f"{noun}_{{i}}"] = {values}\n'
            load += f'    features[f"{noun}_{{i}}"] = FeatureSpace.{feature}()\n'
    if has_classes:
        constants += f"CLASSES = {_list_literal(classes)}\nNUM_CLASSES = len(CLASSES)\n"
        load += "y = np.array([CLASSES.index(row[TARGET]) for row in rows])\n"
        what = f"{len(classes)} classes of {target}"
    else:
        load += 'y = np.array([[float(row[TARGET])] for row in rows], "float32")\n'
        scale = _scale_of(np.array([float(row[target]) for row in training_rows]))
        what = f"the number {target}"
    imports = "import csv\nimport pathlib\n"
    summary = f"{len(rows):,} rows, {what} from {len(numbers) + len(words)} columns"
    return DataFile(summary, imports, constants, load, has_classes, _FEATURES, scale)


def _scale_of(y) -> tuple[float, float]:
    """Returns the mean and deviation of targets, rounded: enough to scale the output."""
    mean, deviation = float(np.mean(y)), float(np.std(y))
    return float(f"{mean:.4g}"), float(f"{deviation:.4g}") or 1.0


def _series_constants(num_series: int, num_steps: int) -> str:
    length = min(48, num_steps // 10)
    if length < 2:
        raise DataFileError(f"A series must have at least 20 steps. Received: {num_steps}.")
    return lines_of_series(length, num_series)


def _are_numbers(rows, name: str, path: str) -> bool:
    """Whether a column holds numbers; raises if a numeric column is empty in some rows."""
    empty = [index for index, row in enumerate(rows) if not (row[name] or "").strip()]
    try:
        texts = (row[name] for row in rows if (row[name] or "").strip())
        are_numbers = all(np.isfinite(float(text)) for text in texts)
    except (TypeError, ValueError):
        return False
    if are_numbers and 0 < len(empty) < len(rows):
        raise DataFileError(
            f"A numeric column must not have empty cells. Received: --data={path}, whose column "
            f"{name!r} is empty in {len(empty)} of {len(rows)} rows, first in row {empty[0] + 1}. "
            "Fill in a number, such as the column's mean, or remove the rows or the column."
        )
    return are_numbers and not empty


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _list_literal(names: Sequence[str]) -> str:
    line = f"[{', '.join(map(_quoted, names))}]"
    if len(line) <= 80:
        return line
    return "[\n" + "".join(f"    {_quoted(name)},\n" for name in names) + "]"
