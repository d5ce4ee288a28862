"""The body of `tfparallel train`: everything that needs TensorFlow loaded."""

import dataclasses
import hashlib
import sys
from typing import Any

import keras
import tensorflow as tf
from absl import flags

from tfparallel.callbacks import chief_only
from tfparallel.callbacks.nan import NaNGuard, NaNLossError
from tfparallel.callbacks.step_time import StepTime
from tfparallel.checkpoint.epoch import EpochCheckpoint, EpochSeeds, EpochState, read_state
from tfparallel.commands.flags import UsageError
from tfparallel.commands.forms import Form, start_form
from tfparallel.data.batches import EpochBatches, evaluation_batches
from tfparallel.diagnostics.report import peak_memory_bytes, versions, write_report
from tfparallel.task import TaskError, load_task

__all__ = ["Result", "train", "write_report"]


@dataclasses.dataclass(frozen=True)
class Result:
    """How a training ended.

    Attributes:
        report: The part of the report that the run itself knows.
        failure: Why it failed, or None.
        is_chief: Whether this process reports for all workers.
    """

    report: dict[str, Any]
    failure: str | None = None
    is_chief: bool = True


def train(path: str, values: flags.FlagValues) -> Result:
    """Trains the task file at `path` as the flags say.

    Raises:
        TaskError: If the task file breaks its contract.
        UsageError: If the devices or the checkpoint do not fit the flags.
    """
    # Before the task file is imported: its imports may start TensorFlow's
    # runtime, and the CPU cannot be split after that.
    form = start_form(values, _facts(path, values))
    keras.utils.set_random_seed(values.seed)
    task = load_task(path)
    train_data, validation_data = task.load_data()
    try:
        batches = EpochBatches(
            train_data,
            global_batch_size=values.global_batch_size,
            seed=values.seed,
            steps_per_epoch=values.steps_per_epoch,
        )
        validation = None
        if validation_data is not None:
            validation = evaluation_batches(validation_data, values.global_batch_size)
    except ValueError as error:
        raise TaskError(str(error)) from error
    configuration = {
        name: getattr(values, name) for name in ("seed", "global_batch_size", "steps_per_epoch")
    }
    state = _state(values, configuration, form)

    # Again, so that the weights do not depend on what load_data drew.
    keras.utils.set_random_seed(values.seed)
    model = form.build(task.build_model)
    task.compile_model(model)
    form.say(
        f"{task.name} ({model.name}): {form}, "
        f"global batch {values.global_batch_size}, seed {values.seed}, "
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
    )
    first_epoch = 0
    if state is not None:
        first_epoch = state.epoch
        _restore(model, state, batches.dataset, form)
        form.say(
            f"resuming at epoch {first_epoch + 1}"
            if first_epoch < values.epochs
            else f"nothing to do: {first_epoch} of {values.epochs} epochs are done"
        )

    step_time = StepTime()
    callbacks = [batches, EpochSeeds(values.seed), NaNGuard(stop=values.stop_on_nan), step_time]
    before = state.history if state is not None else {}
    if values.checkpoint_dir is not None:
        callbacks.append(EpochCheckpoint(values.checkpoint_dir, configuration, before))
    failure = None
    history: dict[str, list[float]] = {}
    if first_epoch < values.epochs:
        try:
            history = model.fit(
                batches.dataset,
                epochs=values.epochs,
                initial_epoch=first_epoch,
                validation_data=validation,
                callbacks=callbacks,
                shuffle=False,  # The batches come shuffled.
                verbose=_verbosity(),
            ).history
        except NaNLossError as error:
            failure = str(error)
    if failure is None and values.save is not None:
        with chief_only.path_of_chief(values.save, form.is_chief) as save_path:
            model.save(save_path)
    report = {
        "model": {"name": model.name, "num_parameters": model.count_params()},
        "devices": form.devices,
        "num_workers": form.num_workers,
        "versions": versions(),
        "history": {
            name: [*before.get(name, []), *(float(value) for value in history.get(name, []))]
            for name in {**before, **history}
        },
        "step_time_seconds": step_time.summary(),
        "peak_memory_bytes": peak_memory_bytes(),
    }
    if state is not None:
        report["resumed_at_epoch"] = first_epoch + 1
    if failure is not None:
        report["failure"] = failure
    kept = {key: value for key, value in report.items() if value}
    return Result(kept, failure, form.is_chief)


def _facts(path: str, values: flags.FlagValues) -> dict[str, Any]:
    """What the workers of one job must agree on."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()[:16]
    names = ("seed", "global_batch_size", "epochs", "steps_per_epoch")
    return {"task file": digest, **{f"--{name}": getattr(values, name) for name in names}}


def _state(
    values: flags.FlagValues, configuration: dict[str, Any], form: Form
) -> EpochState | None:
    """The state to resume from: what the chief finds, whose folder may be its own."""
    if values.checkpoint_dir is None:
        return None
    try:
        state = read_state(values.checkpoint_dir) if form.is_chief else None
    except ValueError as error:
        raise UsageError(str(error)) from error
    if form.workers is not None:
        content = form.workers.exchange(dataclasses.asdict(state) if state else None)[0]
        state = EpochState(**content) if content else None
    if state is None:
        return None
    changed = [
        f"--{name}={configuration[name]} (the checkpoint has {state.configuration.get(name)})"
        for name in configuration
        if configuration[name] != state.configuration.get(name)
    ]
    if changed:
        raise UsageError(
            f"The checkpoint in {values.checkpoint_dir} belongs to another run; to resume, the "
            f"flags that shape the training must be the same. Received: {', '.join(changed)}. "
            "Use the old values, or an empty --checkpoint_dir."
        )
    return state


def _restore(
    model: keras.Model, state: EpochState, dataset: tf.data.Dataset, form: Form
) -> None:
    if not model.built:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(next(iter(dataset)))
        model(x)
    # The optimizer's state is loaded into variables, which must exist, each
    # beside its weight.
    with model.distribute_strategy.scope():
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        if form.is_chief:
            model.load_weights(state.weights_path)
        if form.workers is not None:
            chief_only.send_state(model, form.workers)


def _verbosity() -> int:
    # A bar on a terminal; in a file, one line an epoch.
    return 1 if sys.stdout.isatty() else 2
