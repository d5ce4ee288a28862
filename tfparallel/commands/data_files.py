"""What is in a user's data file, and the lines that read it: for `tfparallel init`."""

import csv
import dataclasses
import os
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

__all__ = [
    "DataFile",
    "DataFileError",
    "lines_of_images",
    "lines_of_series",
    "lines_of_table",
    "lines_of_text",
    "read_data_file",
]

_MOST_CLASSES = 100
_ENCODING = "utf-8-sig"  # UTF-8; the mark with which Excel begins a file is no part of it.
_OTHER_DELIMITERS = {";": "';'", "\t": "tabs", "|": "'|'"}


class DataFileError(ValueError):
    """A data file that a task cannot be written for; the text says what is required."""


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A data file.

    Attributes:
        summary: What was found in it.
        imports: What its lines need.
        constants: What the model must know of it.
        load: The lines that read it.
        has_classes: Whether the targets are classes.
    """

    summary: str
    imports: str
    constants: str
    load: str
    has_classes: bool


def read_data_file(kind: str, path: str, task_path: str, target: str | None = None) -> DataFile:
    """Looks into a data file.

    Args:
        kind: "image", "table", "text" or "series".
        path: Its path, of a file that exists.
        task_path: That of the task file, which names it from where it is itself.
        target: The column of a .csv file to be predicted; of a table the last one by default, of a
            series the first.

    Raises:
        DataFileError: If what is in it does not suit the kind.
    """
    seen = os.path.relpath(path, os.path.dirname(os.path.abspath(task_path)))
    named = f"DATA = pathlib.Path(__file__).parent / {seen!r}\n"
    try:
        if kind == "text":
            return _text(path, named)
        if path.endswith(".csv"):
            return _csv(kind, path, named, target)
        return _npz(kind, path, named)
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"The data file cannot be read: {error}. Received: {path}.") from error


def lines_of_images(shape: Sequence[int]) -> str:
    """The constants of a task on images of that height, width and number of channels."""
    return f"SHAPE = {tuple(shape)}  # Height, width, channels.\n"


def lines_of_table(num_inputs: int) -> str:
    """The constants of a task on so many columns of numbers."""
    return f"NUM_INPUTS = {num_inputs}\n"


def lines_of_text() -> str:
    """The constants of a task on a text."""
    return "LENGTH = 64  # The model reads so many characters at a time.\n"


def lines_of_series(length: int, num_series: int) -> str:
    """The constants of a task on series, of which the model looks back `length` steps."""
    return f"LENGTH = {length}  # The model looks back so many steps.\nNUM_SERIES = {num_series}\n"


def _text(path, named) -> DataFile:
    with open(path, encoding=_ENCODING) as file:
        length = len(file.read())
    if length < 1000:
        raise DataFileError(
            f"A text of at least 1,000 characters is required. Received: {length} in --data={path}."
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
            f"For --kind={kind} x must be numbers with {' or '.join(map(str, ndims))} axes, of at "
            f"least two examples. Received: x of shape {x.shape} and type {x.dtype} in {path}."
        )
    imports = "import pathlib\n"
    if kind == "series":
        constants = named + _looking_back(x.shape[1] if x.ndim == 2 else 1, len(x))
        load = 'with np.load(DATA) as arrays:\n    values = arrays["x"]\n'
        return DataFile(f"{len(x):,} steps", imports, constants, load, False)
    y = arrays["y"]
    if y.shape not in ((len(x),), (len(x), 1)) or y.dtype.kind not in "biuf":
        raise DataFileError(
            f"y must hold a number for each of the {len(x)} examples of x. Received: y of shape "
            f"{y.shape} and type {y.dtype} in {path}."
        )
    has_classes = y.dtype.kind in "biu" and y.min() >= 0 and y.max() < _MOST_CLASSES
    if kind == "image" and not has_classes:
        raise DataFileError(
            f"y must hold classes, whole numbers from 0 to {_MOST_CLASSES - 1}. Received: y of "
            f"type {y.dtype}, from {y.min()} to {y.max()}, in {path}."
        )
    load = 'with np.load(DATA) as arrays:\n    x, y = arrays["x"].astype("float32"), arrays["y"]\n'
    constants = named
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
    return DataFile(f"{len(x):,} examples", imports, constants, load, has_classes)


def _arrays(path, needed) -> dict[str, np.ndarray]:
    write = f"np.savez({path!r}, {', '.join(f'{name}={name}' for name in needed)})"
    if not zipfile.is_zipfile(path):
        size = os.path.getsize(path)
        what = f"a file of {size:,} bytes that is damaged, or of another form" if size else "empty"
        raise DataFileError(
            f"A .npz file, as NumPy writes it, is required. Received: --data={path}, {what}. "
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
        # NumPy has read the header of an array of Python objects, which only pickle can read.
        name = next(name for name in needed if name not in arrays)
        raise DataFileError(
            "The arrays must hold numbers; Python objects are pickled, and pickles are not read, "
            f"since they may run code. Received: --data={path}, with objects in {name}. Convert "
            f"it, such as {name}.astype('float32'), and write it again: {write}"
        ) from error
    return arrays


def _rows(path) -> tuple[list[str], list[dict[str, str]]]:
    """The names in a .csv file's first line, and a row for each line below it."""
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
                        f"Each line must have as many fields as the first. Received: --data={path},"
                        f" of which line {reader.line_num} has {number} of {len(names)} fields."
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
            f"Columns are separated by commas; this file uses {_OTHER_DELIMITERS[used]}. Received: "
            f"--data={path}, whose first line is {names[0]!r}. Write it again with commas, and "
            "with decimal points."
        )


def _csv(kind, path, named, target) -> DataFile:
    names, rows = _rows(path)
    of_numbers = [name for name in names if _are_numbers(rows, name)]
    chosen = target
    if chosen is None and names:
        chosen = names[-1] if kind == "table" else next(iter(of_numbers), None)
    inputs = [name for name in of_numbers if name != chosen]
    if len(rows) < 2 or chosen not in names or (kind == "table" and not inputs):
        raise DataFileError(
            "A first line of names, at least two rows below it, a column to be predicted and one "
            f"of numbers are required. Received: --data={path} with {len(rows)} rows, columns "
            f"{names}, --target={target}; of numbers: {of_numbers}."
        )
    imports = "import csv\nimport pathlib\n"
    read = f'with open(DATA, newline="", encoding="{_ENCODING}") as file:\n'
    read += "    rows = list(csv.DictReader(file))\n"
    if kind == "series":
        if chosen not in of_numbers:
            raise DataFileError(f"The column must hold numbers. Received: --target={chosen}.")
        columns = [chosen, *inputs]
        constants = f"{named}COLUMNS = {_listed(columns)}  # The first is predicted.\n"
        constants += _looking_back(len(columns), len(rows))
        read += "values = np.array([[float(row[name]) for name in COLUMNS] for row in rows])\n"
        return DataFile(f"{len(rows):,} steps of {chosen}", imports, constants, read, False)
    classes = sorted({row[chosen] for row in rows})
    is_whole = all(text.strip().lstrip("-").isdigit() for text in classes)
    has_classes = len(classes) <= _MOST_CLASSES and (is_whole or chosen not in of_numbers)
    if not has_classes and chosen not in of_numbers:
        raise DataFileError(
            f"A column of numbers, or of at most {_MOST_CLASSES} classes, is required. Received: "
            f"--target={chosen} with {len(classes)} different texts."
        )
    constants = f"{named}INPUTS = {_listed(inputs)}\nNUM_INPUTS = len(INPUTS)\n"
    constants += f"TARGET = {_quoted(chosen)}\n"
    load = read
    load += 'x = np.array([[float(row[name]) for name in INPUTS] for row in rows], "float32")\n'
    if has_classes:
        constants += f"CLASSES = {_listed(classes)}\nNUM_CLASSES = len(CLASSES)\n"
        load += "y = np.array([CLASSES.index(row[TARGET]) for row in rows])\n"
        what = f"{len(classes)} classes of {chosen}"
    else:
        load += 'y = np.array([[float(row[TARGET])] for row in rows], "float32")\n'
        what = f"the number {chosen}"
    left_out = [name for name in names if name not in inputs and name != chosen]
    summary = f"{len(rows):,} rows, {what} from {len(inputs)} columns"
    if left_out:
        summary += f"; left out, since not all of it is numbers: {', '.join(left_out)}"
    return DataFile(summary, imports, constants, load, has_classes)


def _looking_back(num_series: int, num_steps: int) -> str:
    length = min(48, num_steps // 10)
    if length < 2:
        raise DataFileError(f"A series of at least 20 steps is required. Received: {num_steps}.")
    return lines_of_series(length, num_series)


def _are_numbers(rows, name: str) -> bool:
    try:
        return all(np.isfinite(float(row[name])) for row in rows)
    except (TypeError, ValueError):
        return False


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _listed(names: Sequence[str]) -> str:
    line = f"[{', '.join(map(_quoted, names))}]"
    if len(line) <= 80:
        return line
    return "[\n" + "".join(f"    {_quoted(name)},\n" for name in names) + "]"
