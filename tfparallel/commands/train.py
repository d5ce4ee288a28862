"""`tfparallel train TASK.py`: trains a task file in parallel."""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import flags

from tfparallel.callbacks import chief_only
from tfparallel.callbacks.checkpoint import Checkpoint
from tfparallel.callbacks.epoch_lines import EpochLines
from tfparallel.callbacks.flight import FlightRecorder
from tfparallel.callbacks.nan import NaNGuard, NaNLossError
from tfparallel.callbacks.preemption import Preemption
from tfparallel.callbacks.step_measures import SentBytes, StepTime
from tfparallel.checkpoint.history import as_numbers
from tfparallel.checkpoint.stored import CheckpointError, ForeignCheckpointError
from tfparallel.collectives.lost_worker import WorkerLostError
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.command_line.exits import LostError, UsageError
from tfparallel.command_line.flag_parsing import value_of
from tfparallel.command_line.options import TrainOptions
from tfparallel.commands.parallelism import Parallelism
from tfparallel.commands.task_setup import compiling, start_chosen_parallelism, use_precision
from tfparallel.data.batches import EpochBatches, evaluation_batches
from tfparallel.data.partition import rows_by_replica
from tfparallel.device_memory import peak_bytes_of_gpus
from tfparallel.diagnostics.inject import Inject
from tfparallel.diagnostics.report import peak_memory_bytes, versions, write_report
from tfparallel.flight.job import chrome_trace, splits
from tfparallel.flight.marks import Marks
from tfparallel.flight.record import FOLDER, Event, WorkerRecord, read_record
from tfparallel.placement.report import held_by_device
from tfparallel.task import Task, TaskError, load_task
from tfparallel.user_log import notice

_NUM_EVENTS = 4000  # The last ones of each worker's flight record.


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Trains the task file according to the flags, and returns the exit code.

    Raises:
        TaskError: If the task file violates its contract.
        UsageError: If the devices or the checkpoint do not match the flags.
    """
    started = time.perf_counter()
    (path,) = positional
    with _folder_for_records(bool(values.report or values.trace)):
        report, is_chief = _train(path, values, TrainOptions.of(values))
    if values.report is not None and is_chief:
        seconds = time.perf_counter() - started
        content = {"command": "train", **report, "wall_time_seconds": seconds}
        write_report(values.report, content)
    if "failure" in report:
        print(f"tfparallel train: {report['failure']}", file=sys.stderr)
        return 1
    for name in ("save", "report", "trace"):
        is_written = name != "trace" or os.path.exists(values.trace or "")
        if is_chief and is_written and getattr(values, name) is not None:
            print(f"wrote {getattr(values, name)}")
    return 0


def _train(path, values, options: TrainOptions) -> tuple[dict[str, Any], bool]:
    """Returns the training's report, and whether this process is the chief."""
    # Before the task file is imported: its imports may start TensorFlow's runtime, after which
    # the CPU cannot be split.
    parallelism, options, plan = start_chosen_parallelism(path, options, _facts(path, values))
    use_precision(values.precision)
    keras.utils.set_random_seed(values.seed)
    task = load_task(path)
    task_callbacks = _callbacks(task, values.callbacks)
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
        f"--{name}": getattr(values, name)
        for name in ("seed", "global_batch_size", "steps_per_epoch")
    }

    # Again: the initial weights must not depend on load_data's random numbers.
    keras.utils.set_random_seed(values.seed)
    model = parallelism.build(task.build_model)
    datasets = [batches.dataset] if validation is None else [batches.dataset, validation]
    inputs = [dataset.element_spec[0] for dataset in datasets]
    compiling(task, values.jit_compile, inputs)(model)
    parallelism.say(
        f"{task.name} ({model.name}): {parallelism.as_built(model)}, "
        f"global batch {values.global_batch_size}, seed {values.seed}, "
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
    )
    step_time, sent_bytes = StepTime(), SentBytes()
    callbacks = [batches, NaNGuard(stop=values.stop_on_nan), step_time, sent_bytes]
    callbacks += task_callbacks
    if values.tensorboard is not None:
        callbacks.append(keras.callbacks.TensorBoard(values.tensorboard))
    size = parallelism.text_of_size
    lines = EpochLines(batches.num_examples, batches.num_passed, f"the step of {size}")
    if parallelism.is_chief:
        callbacks.append(lines)
    checkpoint = None
    if values.checkpoint_dir is not None:
        _build(model, batches.dataset)
        checkpoint = Checkpoint(
            values.checkpoint_dir,
            every_steps=values.checkpoint_every_steps,
            batches=batches,
            configuration=configuration,
        )
        callbacks.append(checkpoint)
    if values.inject is not None:
        callbacks.append(Inject(value_of(values, "inject"), values.checkpoint_dir))
    preemption: contextlib.AbstractContextManager = contextlib.nullcontext()
    if checkpoint is not None:
        preemption = Preemption(checkpoint)
        callbacks.append(preemption)
    recorder: Any = contextlib.nullcontext()
    if parallelism.workers is None and not parallelism.num_servers:
        # Independent workers each keep a record, too.
        recorder = FlightRecorder.if_enabled(int(os.environ.get("RANK", "0")), 1)
        if isinstance(recorder, FlightRecorder):
            callbacks = [recorder.step_end, *callbacks, recorder]
    failure = None
    try:
        with preemption, recorder:
            model.fit(
                batches.dataset,
                epochs=values.epochs or task.epochs or 1,
                validation_data=validation,
                callbacks=callbacks,
                shuffle=False,  # The batches are already shuffled.
                verbose=0,  # `EpochLines` prints the progress.
            )
    except ForeignCheckpointError as error:
        raise UsageError(str(error)) from error
    except WorkerLostError as error:
        raise LostError(str(error)) from error
    except (NaNLossError, CheckpointError) as error:
        failure = str(error)
    finally:
        lines.close()
    sent = num_sums = None
    if parallelism.workers is not None:  # Before the workers exchange their records.
        traffic = parallelism.workers.traffic
        sent, num_sums = traffic.read(), traffic.num_sums
    records = _gather_records(parallelism.workers, bool(values.report or values.trace))
    if values.trace and parallelism.is_chief:
        if records:
            with open(values.trace, "w", encoding="utf-8") as file:
                json.dump(chrome_trace(records), file)
        else:
            notice(f"No timeline was written, because no flight record was kept ({FOLDER}).")
    if checkpoint is not None:
        del step_time.seconds[: checkpoint.num_passed]
    if failure is None and values.save is not None:
        with chief_only.path_of_chief(values.save, parallelism.is_chief) as save_path:
            model.save(save_path)
    report = {
        "configuration": {"task": path, **options.configuration(values)},
        "model": {"name": model.name, "num_parameters": model.count_params()},
        "data": _report_of_data(parallelism, batches, model, values.global_batch_size),
        "versions": versions(),
        "history": as_numbers(model.history.history),
        "step_time_seconds": step_time.summary(),
        "sent_bytes_in_a_step": sent_bytes.in_a_step,
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_gpu_bytes": peak_bytes_of_gpus(parallelism.devices),
        "plan": None if plan is None else plan.as_json(),
        **_report_of_parallelism(parallelism, model),
        **({} if sent is None else {"sent_bytes": sent, "num_reductions": num_sums}),
        "failure": failure,
    }
    if records:
        report["time_of_a_step_seconds"] = [dataclasses.asdict(split) for split in splits(records)]
    if checkpoint is not None and checkpoint.resumed is not None:
        report["resumed_at_epoch"] = checkpoint.resumed["epoch"] + 1
        report["resumed_at_step"] = checkpoint.resumed["step"]
    non_empty = {key: value for key, value in report.items() if value not in (None, {})}
    return non_empty, parallelism.is_chief


def _callbacks(task: Task, is_enabled: bool | None) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of the task file."""
    if is_enabled and not task.has_callbacks:
        raise UsageError(
            "--callbacks requires the task file to define callbacks(), which returns a list of "
            f"Keras callbacks. Received: --callbacks with {task.path}, which has none."
        )
    return [] if is_enabled is False else task.callbacks()


def _facts(path: str, values: flags.FlagValues) -> dict[str, Any]:
    """Returns the facts that all workers of a job must agree on."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()[:16]
    names = ("seed", "global_batch_size", "epochs", "steps_per_epoch")
    names = (*names, "precision", "jit_compile", "sync", "shard")
    return {"task file": digest, **{f"--{name}": getattr(values, name) for name in names}}


def _report_of_data(parallelism, batches, model, global_batch_size) -> dict[str, Any]:
    report = batches.report()
    if parallelism.name == "data" and not parallelism.num_servers and model.strategy is not None:
        rows = rows_by_replica(model.distribute_strategy, global_batch_size)
        report |= {"partition": "batch", "rows_of_a_full_batch": rows}
    return report


def _report_of_parallelism(parallelism: Parallelism, model: keras.Model) -> dict[str, Any]:
    """Reports where the model was trained, and how its weights were updated."""
    report: dict[str, Any] = {
        "devices": parallelism.devices,
        "num_workers": parallelism.num_workers,
        "all_reduce": parallelism.all_reduce_report(model),
    }
    if parallelism.name != "none":
        report["layout"] = model.layout.to_json()
    if parallelism.name in ("data", "pipeline", "hybrid"):
        report["joined_outputs"] = getattr(model, "why_joined", None) or False
    if parallelism.name in ("model", "pipeline"):
        report["placement"] = held_by_device(model)
    if parallelism.name == "data":
        report |= {"sync": parallelism.sync, "shard": parallelism.shard}
    elif "sync" in parallelism.cut:
        report["sync"] = parallelism.cut["sync"]
        report["shard"] = parallelism.cut.get("shard")
    if report.get("sync", "").startswith(("accumulate", "adascale")):
        report["steps_of_an_update"] = model.num_accumulated_steps
    if report.get("sync", "").startswith("adascale"):
        report["learning_rate_gain"] = model.learning_rate_gain
    if parallelism.workers is not None:
        report["compression"] = parallelism.strategy.compression
    if parallelism.num_servers:
        report |= {"num_servers": parallelism.num_servers, "staleness": model.staleness}
        report["num_reductions"] = 0  # Asynchronous workers sum nothing.
        number, of_a_step = model.staleness["updates"], model.bytes_of_a_step
        report["sent_bytes"] = {name: number * size for name, size in of_a_step.items()}
    return report


def _build(model: keras.Model, dataset: tf.data.Dataset) -> None:
    """Builds a model that is built by its first batch: a checkpoint needs its variables."""
    if not model.built:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(next(iter(dataset)))
        model(x)


@contextlib.contextmanager
def _folder_for_records(is_enabled: bool) -> Iterator[None]:
    """Creates a folder for flight records, unless the launcher has."""
    if not is_enabled or os.environ.get(FOLDER):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tfparallel_flight_") as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


def _gather_records(workers: ProcessGroup | None, wants_records: bool) -> list[WorkerRecord]:
    """Gathers the flight records of all workers, if any worker wants them and all have one.

    A collective: all workers must call it.
    """

    def exchange(value):
        return [value] if workers is None else workers.exchange(value, "the records of steps")

    try:
        records = exchange(_local_record()) if any(exchange(wants_records)) else []
    except (tf.errors.OpError, WorkerLostError):  # A worker has ended; the training is complete.
        return []
    if not all(records):
        return []
    return [
        WorkerRecord(
            each["about"], {}, Event(*each["now"]), "", tuple(Event(*e) for e in each["events"])
        )
        for each in records
    ]


def _local_record() -> dict[str, Any] | None:
    if Marks.current is None:
        return None
    record = read_record(Marks.current.record.path)
    return {
        "about": record.about,
        "now": dataclasses.astuple(record.now),
        "events": [dataclasses.astuple(event) for event in record.events[-_NUM_EVENTS:]],
    }
