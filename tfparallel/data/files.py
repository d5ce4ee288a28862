"""File sources: TFRecords with an index of their records, and NPZ shards with indexed rows.

Shuffling covers all examples or, with `window=W`, W files at a time: each epoch permutes the files,
and mixes the examples within each group of W files. Then only the files of one window are read at a
time, mostly sequentially, at the price of a coarser shuffle.
"""

import collections
import os
import threading
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.data.example_order import window_order
from tfparallel.data.sources import Source, cast
from tfparallel.texts import short


class _Files(Source):
    """Examples in several files: the common base of records and arrays."""

    def __init__(self, paths: Sequence[str | os.PathLike], window: int | None):
        if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable):
            fix = f"[{os.fspath(paths)!r}]" if isinstance(paths, str | os.PathLike) else "[path]"
            raise ValueError(
                f"{type(self).__name__} needs a list of paths. Received: {short(paths)}. Pass {fix}"
                ", or `sorted(glob.glob('train-*'))`."
            )
        self.paths = [os.fspath(path) for path in paths]
        gfile = tf.io.gfile
        missing = [path for path in self.paths if not gfile.exists(path) or gfile.isdir(path)]
        if not self.paths or missing:
            raise ValueError(
                f"{type(self).__name__} needs the paths of existing files. Received: "
                f"{', '.join(missing) if missing else 'no path'} (in {os.getcwd()}). "
                "`sorted(glob.glob('train-*'))` lists files in the same order on every machine."
            )
        if len(set(self.paths)) < len(self.paths):
            repeated = [path for path, n in collections.Counter(self.paths).items() if n > 1]
            raise ValueError(
                "Each file must be listed once; otherwise its examples are seen twice per epoch. "
                f"Received twice: {', '.join(repeated)}."
            )
        if window is not None and window < 1:
            raise ValueError(
                "`window` must be the number of files to shuffle together, at least 1, or None for "
                f"all. Received: window={window}."
            )
        self.window = window
        self.sizes: list[int] = []

    def _count(self, sizes):
        self.sizes = list(sizes)
        self._ends = np.cumsum(self.sizes)
        self.num_indices = int(self._ends[-1])
        if not self.num_indices:
            raise ValueError(
                f"{type(self).__name__}: at least one example is required. Received: "
                f"{len(self.paths)} files without any ({self.paths[0]}, …)."
            )

    def order(self, seed, epoch):
        if self.window is None:
            return super().order(seed, epoch)
        return window_order(self.sizes, self.window, seed, epoch)

    def _places(self, indices):
        """Returns the file of each index, and its row in that file."""
        files = np.searchsorted(self._ends, indices, side="right")
        return files, indices - (self._ends - self.sizes)[files]

    def __str__(self):
        mixed = f", {self.window} files at a time" if self.window is not None else ""
        name = type(self).__name__
        return f"{name} of {self.num_indices} examples in {len(self.paths)} files{mixed}"


class TFRecords(_Files):
    """Records of TFRecord files, indexed by their offsets.

    The constructor builds the index from the lengths in front of the records, without reading the
    records. The index is the same on every worker, and is not written to disk.

    Args:
        paths: The files, uncompressed, in the same order on every worker.
        parse: Converts one serialized record, a scalar string tensor, to an example
            `(x, y[, sample_weight])`, in TensorFlow code such as `tf.io.parse_single_example`. All
            examples must have the same shape, so that they can be batched.
        window: Number of files that are shuffled together; None for all.

    Raises:
        ValueError: If there are no files or no records, or a file is compressed or truncated.

    Example:
        >>> import glob
        >>> def parse(record):
        ...     fields = tf.io.parse_single_example(record, {
        ...         "image": tf.io.FixedLenFeature([64], tf.float32),
        ...         "label": tf.io.FixedLenFeature([], tf.int64)})
        ...     return fields["image"], fields["label"]
        >>> paths = sorted(glob.glob("train-*.tfrecord"))
        >>> train = tfparallel.data.TFRecords(paths, parse, window=8)
        >>> batches = tfparallel.data.EpochBatches(train, global_batch_size=64)
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike],
        parse: Callable[[tf.Tensor], tuple[Any, ...]],
        *,
        window: int | None = None,
    ):
        if not callable(parse):
            raise ValueError(
                "`parse` must be a function that turns a serialized record into an example (x, y). "
                f"Received: parse={short(parse)}. Write one with `tf.io.parse_single_example`."
            )
        super().__init__(paths, window)
        self._parse = lambda record: tf.nest.map_structure(cast, tuple(parse(record)))
        offsets = [_offsets(path) for path in self.paths]
        self._count(map(len, offsets))
        signature = (
            tf.function(self._parse)
            .get_concrete_function(tf.TensorSpec([], tf.string))
            .structured_outputs
        )
        self._signature = tf.nest.map_structure(tf.TensorSpec.from_tensor, signature)
        with tf.device("CPU:0"):
            self._offsets = tf.constant(np.concatenate(offsets))
            self._names = tf.constant(self.paths)

    def read(self, indices):
        offsets = tf.gather(self._offsets, indices)
        files = tf.searchsorted(tf.constant(self._ends), indices, side="right")
        return tf.map_fn(
            lambda place: self._parse(_record(*place)),
            (tf.gather(self._names, files), offsets),
            fn_output_signature=self._signature,
        )


def _record(path: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """Reads the record at `offset` with TensorFlow's own reader, which verifies its checksum."""
    records = tf.raw_ops.TFRecordDatasetV2(
        filenames=path[None], compression_type="", buffer_size=0, byte_offsets=offset[None]
    )
    types, shapes = [tf.string], [[]]
    first = tf.raw_ops.TakeDataset(
        input_dataset=records, count=1, output_types=types, output_shapes=shapes
    )
    (record,) = tf.raw_ops.DatasetToSingleElement(
        dataset=first, output_types=types, output_shapes=shapes
    )
    return record


def _offsets(path: str) -> np.ndarray:
    """Returns the offsets of the records in a file, int64.

    A record consists of its length (8 bytes, little-endian), a checksum of the length (4 bytes),
    the data, and a checksum of the data (4 bytes).
    """
    size = tf.io.gfile.stat(path).length
    offsets, offset = [], 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while offset < size:
            offsets.append(offset)
            file.seek(offset)
            head = file.read(8)
            offset += 16 + int.from_bytes(head, "little")
    if offset != size:
        with tf.io.gfile.GFile(path, "rb") as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
        hint = (
            "It is compressed; write it without compression."
            if is_compressed
            else "Is it truncated, or another kind of file?"
        )
        raise ValueError(
            f"TFRecords needs intact, uncompressed TFRecord files. Received: {path} of {size} "
            f"bytes, whose record {len(offsets) - 1} would end at byte {offset}. {hint}"
        )
    return np.array(offsets, np.int64)


class NPZShards(_Files):
    """Rows of the arrays in `.npz` files, each of which is a shard of the examples.

    Args:
        paths: The files, in the same order on every worker. All must hold arrays of the same names,
            dtypes and shapes, except for the first axis, which is the example.
        x: The name of the input array, or a nested structure of names.
        y: The same for the targets.
        sample_weight: The same for the sample weights, if any.
        window: Number of files that are shuffled together. None shuffles all files, and keeps all
            of them in memory; with a window, the files of two windows are in memory.

    Raises:
        ValueError: If there are no files, or their arrays do not match.

    Example:
        >>> import glob
        >>> train = tfparallel.data.NPZShards(sorted(glob.glob("train-*.npz")), window=4)
        >>> batches = tfparallel.data.EpochBatches(train, global_batch_size=64)
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike],
        *,
        x: Any = "x",
        y: Any = "y",
        sample_weight: str | None = None,
        window: int | None = None,
    ):
        super().__init__(paths, window)
        self._fields = (x, y) if sample_weight is None else (x, y, sample_weight)
        self._names = tf.nest.flatten(self._fields)
        self._shards: collections.OrderedDict[int, list[np.ndarray]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._specs: dict[str, tuple[tuple[int, ...], np.dtype]] = {}  # Per example.
        sizes = []
        for path in self.paths:
            specs = _npz_specs(path, self._names)
            rows = {name: shape[0] if shape else None for name, (shape, _) in specs.items()}
            if len(set(rows.values())) > 1 or None in rows.values():
                raise ValueError(
                    "The arrays of a shard must have the same number of examples, their first "
                    f"axis. Received: {path} with {rows}."
                )
            for name, (shape, dtype) in specs.items():
                expected = self._specs.setdefault(name, (shape[1:], dtype))
                if (shape[1:], dtype) != expected:
                    raise ValueError(
                        "All shards must hold examples of the same shape and type. Received: "
                        f"{name!r} of {expected[0]} {expected[1]} in {self.paths[0]}, of "
                        f"{shape[1:]} {dtype} in {path}."
                    )
            sizes.append(next(iter(rows.values())))
        self._count(sizes)

    def read(self, indices):
        arrays = self._by_python(self._rows, indices, self._specs.values())
        by_name = dict(zip(self._specs, arrays, strict=True))
        return tf.nest.map_structure(by_name.__getitem__, self._fields)

    def _rows(self, indices):
        out = [np.empty((len(indices), *shape), dtype) for shape, dtype in self._specs.values()]
        files, rows = self._places(indices)
        with self._lock:
            for file in np.unique(files):
                in_file = files == file
                for array, shard in zip(out, self._shard(int(file)), strict=True):
                    array[in_file] = shard[rows[in_file]]
        return out

    def _shard(self, file):
        if file not in self._shards:
            # Prefetching reads ahead into the next window.
            if self.window is not None and len(self._shards) == 2 * self.window:
                self._shards.popitem(last=False)
            with np.load(self.paths[file]) as arrays:
                self._shards[file] = [arrays[name] for name in self._specs]
        self._shards.move_to_end(file)
        return self._shards[file]


def _npz_specs(path, names) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Returns the shapes and dtypes of the named arrays, from their headers."""
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"NPZShards needs files written by numpy.savez or savez_compressed. Received: {path}, "
            "which is not an archive. Is it truncated, or another kind of file?"
        )
    specs = {}
    with np.load(path) as arrays:
        missing = [name for name in names if name not in arrays.files]
        if missing:
            raise ValueError(
                f"Each shard must hold the arrays {names}. Received: {path} with "
                f"{arrays.files}. Name them: NPZShards(paths, x=..., y=...)."
            )
        for name in names:
            with arrays.zip.open(f"{name}.npy") as file:
                read_header = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[np.lib.format.read_magic(file)]
                shape, _, dtype = read_header(file)
            specs[name] = (shape, dtype)
    return specs
