"""Checks of flag combinations of task commands that the rows of the table cannot express."""

import os
from collections.abc import Sequence

from absl import flags

from tfparallel.bench.sizes import COLLECTIVES, ITEM_BYTES, sweep
from tfparallel.command_line.flag_parsing import nearest
from tfparallel.command_line.options import TrainOptions
from tfparallel.layout.layout import RECOMPUTES
from tfparallel.layout.schedule import ScheduleError, make_schedule
from tfparallel.texts import parse_bytes


def in_parallel(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of the flags for parallel training."""
    problems = []
    if values.parallel == "hybrid" and values.mesh is None:
        problems.append(
            "--parallel=hybrid needs a mesh: the number of devices along each axis. Received: no "
            "--mesh. Add --mesh=data=2,pipeline=2, for example."
        )
    problems += _option_problems(
        values, _sync_problems, _shard_problems, _micro_batch_problems, _schedule_problems
    )
    count = len(values.devices) if values.devices is not None else values.num_devices
    if values.parallel == "none" and count is not None and count > 1:
        flag = f"--num_devices={count}"
        if values.devices is not None:
            flag = f"--devices={','.join(values.devices)}"
        problems.append(
            f"--parallel=none trains on one device. Received: {flag}. Use --parallel=data, or one "
            "device."
        )
    return problems


def _sync_problems(options: TrainOptions) -> list[str]:
    """Checks that the parallelism supports the synchronization policy."""
    policy, parallel = options.policy, options.parallel
    in_micro_batches = parallel in ("pipeline", "hybrid")
    is_plain = not (
        policy.grows or policy.scales_rate or policy.is_local or policy.is_async
    )
    if options.sync == "every_step" or parallel == "data" or (in_micro_batches and is_plain):
        return []
    takes = "only every_step and accumulate:N" if in_micro_batches else "none"
    return [
        f"Of the --sync policies, --parallel={parallel} supports {takes}; --parallel=data supports "
        f"all. Received: --sync={options.sync} with --parallel={parallel}. Use --parallel=data, or "
        "drop --sync."
    ]


def _shard_problems(options: TrainOptions) -> list[str]:
    """Checks that the parallelism supports --shard; sharded gradients need accumulation."""
    if options.shard != "gradients":
        return []
    if options.parallel != "data":
        return [
            "A mesh supports --shard=optimizer and --shard=parameters. Received: "
            f"--shard=gradients with --parallel={options.parallel}. Use one of them, or "
            "--parallel=data."
        ]
    if not options.policy.accumulates:
        return [
            "--shard=gradients shards gradients that several steps accumulate. Received: "
            f"--shard=gradients with --sync={options.sync}. Add --sync=accumulate:4, or use "
            "--shard=optimizer."
        ]
    return []


def _micro_batch_problems(options: TrainOptions) -> list[str]:
    number, replicas = options.num_pieces, options.mesh.data
    in_micro_batches = options.parallel in ("pipeline", "hybrid", "auto")
    if not in_micro_batches or number * replicas <= options.global_batch_size:
        return []
    of_each = f", for {replicas} replicas," if replicas > 1 else ""
    return [
        "A batch must have at least one example per micro-batch. Received: "
        f"--num_micro_batches={number}{of_each} with "
        f"--global_batch_size={options.global_batch_size}."
    ]


def _schedule_problems(options: TrainOptions) -> list[str]:
    """Checks that the schedule exists, if the number of stages is known."""
    number = options.mesh.pipeline
    if options.parallel == "pipeline":
        number = len(options.devices or ()) or options.num_devices
    if options.parallel not in ("pipeline", "hybrid") or not number:
        return []
    pipeline = options.of_pipeline()
    try:
        make_schedule(
            pipeline["schedule"],
            number,
            pipeline["num_micro_batches"],
            pipeline["chunks_per_device"],
        )
    except ScheduleError as error:
        return [str(error)]
    return []


def _option_problems(values, *checks) -> list[str]:
    """Runs checks on the parsed options; skips them if parsing fails, which the rows report."""
    try:
        options = TrainOptions.of(values)
        return [problem for check_options in checks for problem in check_options(options)]
    except ValueError:
        return []


def train(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of the flags of `train`."""
    problems = in_parallel(values, positional)
    for name, what in (("checkpoint_dir", "checkpoint folder"), ("tensorboard", "folder")):
        path = getattr(values, name)
        if path is not None and os.path.isfile(path):
            problems.append(
                f"The {what} must not be a file. Received: --{name}={path}. Choose a folder."
            )
    strikes_checkpoint = (values.inject or "").startswith("corrupt_checkpoint")
    if strikes_checkpoint and values.checkpoint_dir is None:
        problems.append(
            "corrupt_checkpoint needs checkpoints. Received: --inject="
            f"{values.inject} without --checkpoint_dir."
        )
    return problems


def check(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of the flags of `check`."""
    problems = in_parallel(values, positional)
    if values.parallel == "none":
        problems.append(
            "A parallelism to check is required. Received: --parallel=none. Use --parallel=data."
        )
    for name in ("compression", "sync"):
        if getattr(values, name) not in (None, "every_step"):
            problems.append(
                "`tfparallel check` compares with one device that updates its weights in every "
                f"step. Received: --{name}={getattr(values, name)}. Drop it, and measure its "
                "effect on accuracy with `tfparallel train`."
            )
    return problems


def plan(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of the flags of `plan`."""
    problems = _option_problems(values, _micro_batch_problems, _schedule_problems)
    if values.parallel == "pipeline" and values.num_devices == 1:
        problems.append(
            "A pipeline needs at least two devices, one per stage. Received: --parallel=pipeline "
            "with --num_devices=1. Add --num_devices=2."
        )
    return problems


def bench(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of `bench all_reduce` and the other collectives."""
    problems = []
    if not positional or positional[0] not in COLLECTIVES:
        match = nearest(positional[0].replace("-", "_"), COLLECTIVES) if positional else None
        fix = f"Did you mean {match}?" if match else "Example: tfparallel bench all_reduce"
        if positional and positional[0].endswith(".py"):
            fix += f" {positional[0]}"
        problems.append(
            f"The name of a collective is required: {', '.join(COLLECTIVES)}; or `train TASK.py`, "
            f"or `pipeline TASK.py`. Received: {list(positional)}. {fix}"
        )
    if len(positional) == 2 and positional[0] in COLLECTIVES[1:]:
        problems.append(
            "With a task file, the collective must be all_reduce, which sums gradients. Received: "
            f"{' '.join(positional)}. Drop the file."
        )
    if values.save_profile and positional and positional[0] in COLLECTIVES[1:]:
        problems.append(
            "A profile is about summing gradients, so it needs all_reduce. Received: "
            f"--save_profile with {positional[0]}. Drop the flag."
        )
    if len(positional) > 2:
        problems.append(
            f"tfparallel bench takes at most one task file. Received: {list(positional[1:])}."
        )
    problems += size_problems(values, ITEM_BYTES[values.dtype])
    return problems + _bench_task_problems(values, positional[1:])


def counts_of(values: flags.FlagValues, item_bytes: int) -> list[int]:
    """Returns the element counts of a sweep.

    Raises:
        ValueError: If there are none.
    """
    sizes = parse_bytes(values.min_bytes), parse_bytes(values.max_bytes)
    return sweep(*sizes, values.step_factor, item_bytes)


def size_problems(values: flags.FlagValues, item_bytes: int) -> list[str]:
    """Returns the problems of a sweep's sizes."""
    try:
        counts_of(values, item_bytes)
    except ValueError as error:
        return [f"--min_bytes, --max_bytes, --step_factor: {error}"]
    return []


def _bench_task_problems(values, task) -> list[str]:
    names = ("min_bytes", "max_bytes", "step_factor", "unalign")
    size_flags = [f"--{name}={getattr(values, name)}" for name in names if values[name].present]
    if task and size_flags:
        return [
            f"With a task file, the model's gradients determine the sizes. Received: {task[0]} and "
            f"{', '.join(size_flags)}. Drop the file or the sizes."
        ]
    if task and values.save_profile:
        return [
            f"A profile needs a sweep over sizes. Received: --save_profile with {task[0]}. Drop "
            "one of the two."
        ]
    return []


def bench_pipeline(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of the flags of `bench pipeline`."""
    problems = []
    for name in ("num_devices", "num_micro_batches"):
        problems += _number_problems(values, name)
    choices = {"schedule": ("gpipe", "1f1b", "interleaved"), "recompute": RECOMPUTES}
    for name, words in choices.items():
        unknown = [text for text in getattr(values, name) if text not in words]
        if unknown:
            problems.append(
                f"--{name} must list {', '.join(words)}. Received: {', '.join(unknown)}."
            )
    return problems


def bench_train(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of the flags of `bench train`."""
    return _number_problems(values, "nproc_per_node")


def _number_problems(values, name: str) -> list[str]:
    texts = getattr(values, name)
    if texts and all(text.isdecimal() and int(text) >= 1 for text in texts):
        return []
    return [
        f"--{name} must be whole numbers of at least 1, such as 1,2,4. Received: "
        f"--{name}={','.join(texts)}."
    ]
