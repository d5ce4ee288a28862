"""The body of `tfparallel check --prove`: why a model may be computed in pieces of the batch."""

import inspect

import keras
from absl import flags

from tfparallel.commands.precision import use_precision
from tfparallel.data.batches import first_batches
from tfparallel.engine.check_rows import exchange_moments, refusal_of
from tfparallel.engine.proof import OfLayer, explained
from tfparallel.extend import original_class
from tfparallel.task import load_task

__all__ = ["prove"]


def prove(path: str, values: flags.FlagValues) -> int:
    """Judges the model of a task file, and prints where the rows are in what each layer makes.

    Returns:
        0 if each example is treated by itself, else 1.

    Raises:
        TaskError: If the task file breaks its contract.
    """
    use_precision(values.precision)
    keras.utils.set_random_seed(values.seed)
    task = load_task(path)
    data, _ = task.load_data()
    (batch,) = first_batches(data, global_batch_size=2, seed=values.seed, num_batches=1)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    model = task.build_model()
    if not model.built:
        model(x)
    exchange_moments(model)
    mode = {"training": True} if "training" in inspect.signature(model.call).parameters else {}
    proof, layers = explained(model, model.__call__, (x,), mode)
    print(f"{task.name}: {proof.num_operations} operations, of any number of rows")
    for line in _table(layers):
        print(line)
    if proof.fault is not None:
        print(refusal_of(model, proof.fault))
        return 1
    print("Each output has a row for each example, made of that example alone.")
    return 0


def _table(layers: list[OfLayer]):
    rows = [("layer", "class", "operations", "its output", "")]
    for each in layers:
        notes = [
            *(["draws"] if each.draws else []),
            *(["pieces exchange batch statistics"] if each.exchanges else []),
        ]
        name = original_class(each.layer).__name__
        rows.append((each.path, name, str(each.num_operations), str(each.output), ", ".join(notes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
