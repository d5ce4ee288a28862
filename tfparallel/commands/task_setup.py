"""The common setup of commands on a task file: precision, plan and parallelism.

With `--parallel=auto`, the parallelism is the plan's first candidate.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfparallel import devices as device_lib
from tfparallel.activity import Activity
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.command_line.exits import UsageError
from tfparallel.command_line.options import TrainOptions
from tfparallel.commands.parallelism import Parallelism, hide_gpus_if_unused, start_parallelism
from tfparallel.layout.mesh import Mesh
from tfparallel.planning.candidates import BALANCES, Candidate, Choices
from tfparallel.planning.planner import Plan, make_plan
from tfparallel.planning.trials import after_trials, batch_of
from tfparallel.problems import PlacementError
from tfparallel.seams.compiled import compile_arguments
from tfparallel.task import Task, TaskError, load_task
from tfparallel.texts import counted, size_text

_BALANCES = {"model": ("memory",), "pipeline": ("time",), "auto": BALANCES}
_OF_A_PIPELINE = ("num_micro_batches", "schedule", "chunks_per_device", "recompute")


def use_precision(precision: str | None) -> None:
    """Sets the dtype policy of all layers created from now on.

    Call it before importing the task file, which may create layers.

    Args:
        precision: The value of `--precision`; None keeps Keras's default.
    """
    if precision is not None:
        keras.config.set_floatx("float64" if precision == "float64" else "float32")
        keras.config.set_dtype_policy(precision)


def compiling(
    task: Task, jit_compile: bool | None, inputs: Sequence[Any] = ()
) -> Callable[[keras.Model], None]:
    """Returns a function that compiles a task's model, and applies `--jit_compile`.

    Args:
        task: The task.
        jit_compile: The value of `--jit_compile`; None keeps the task's choice.
        inputs: Batches of inputs, or their specs; the function raises a `TaskError` if the model
            cannot take them.
    """

    def compile_with_flag(model: keras.Model) -> None:
        for batch in inputs:
            _check_input(task, model, batch)
        task.compile_model(model)
        if jit_compile is not None:
            model.jit_compile = jit_compile
            if (saved := compile_arguments(model)) is not None:
                saved["jit_compile"] = model.jit_compile

    return compile_with_flag


def _check_input(task: Task, model: keras.Model, batch: Any) -> None:
    """Raises if a model's only input has another number of dimensions than the data."""
    inputs = getattr(model, "inputs", None)
    if not isinstance(inputs, list) or len(inputs) != 1 or not hasattr(batch, "shape"):
        return
    if getattr(batch.shape, "rank", 0) is None:  # Unknown before the first batch.
        return
    expected, received = tuple(inputs[0].shape), tuple(batch.shape)
    longer, shorter = sorted((expected, received), key=len, reverse=True)
    # Keras adds or drops a last dimension of size 1.
    if len(longer) == len(shorter) or (len(longer) == len(shorter) + 1 and longer[-1] == 1):
        return
    fix = ""
    if len(received) > len(expected):
        fix = " Batches are made by --global_batch_size: drop `.batch(...)` from a tf.data.Dataset."
    raise TaskError(
        f"The data must have examples of the shape that the model takes, {expected[1:]}. Received: "
        f"examples of shape {received[1:]} from load_data() in {task.path}.{fix}"
    )


def start_chosen_parallelism(
    path: str, options: TrainOptions, facts: Mapping[str, Any]
) -> tuple[Parallelism, TrainOptions, Plan | None]:
    """Starts the parallelism named by the flags; with `--parallel=auto`, the planned one.

    Args:
        path: The task file.
        options: The flags.
        facts: Values that all workers must agree on.

    Returns:
        The parallelism, the options updated with the choice, and the plan, if there is one.

    Raises:
        UsageError: If nothing fits; also the errors of `start_parallelism`.
    """
    if options.parallel != "auto":
        return start_parallelism(options, facts), options, None
    devices = _devices(options)
    if len(devices) == 1 and options.device_memory is None:
        first, why, plan = Candidate(Mesh()), "there is one device", None
    else:
        plan = _planned(path, options, devices)
        first, why = plan.first, plan.why
        if first is None:
            raise UsageError(nothing_fits(plan))
    chosen = _chosen(options, first, devices)
    parallelism = start_parallelism(chosen, facts)
    if first.mesh.pipeline > 1:  # Exactly the stages whose step was predicted.
        cut = {**parallelism.cut, "layers_per_stage": first.layers_per_stage}
        parallelism = dataclasses.replace(parallelism, cut=cut)
    parallelism.say(f"--parallel=auto chose {first.name} (--parallel={first.parallelism}): {why}")
    return parallelism, chosen, plan


def _devices(options) -> list[str]:
    """Returns the devices to choose from; splits the CPU before TensorFlow's runtime starts."""
    try:
        cluster = Cluster.from_env()
        if cluster.num_workers > 1 and not options.allow_independent_workers:
            raise UsageError(
                "--parallel=auto only chooses among the meshes of one process. Received: one of "
                f"{cluster.num_workers} workers ({cluster.source}). Choose --parallel=data or "
                "hybrid, or add --allow_independent_workers."
            )
        hide_gpus_if_unused(options)
        return device_lib.choose_devices(
            options.num_devices, options.device_type, options.devices
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _planned(path, options, devices) -> Plan:
    use_precision(options.precision)
    keras.utils.set_random_seed(options.seed)
    try:
        return plan_task(load_task(path), len(devices), options, devices)
    finally:
        # Reset Keras's name counters: the trained model gets the same names as without a plan.
        keras.backend.clear_session()


def _chosen(options: TrainOptions, first: Candidate, devices: list[str]) -> TrainOptions:
    """Returns the options as if the user had requested the chosen candidate."""
    mesh = first.mesh
    by_name = options.devices is not None
    chosen: dict[str, Any] = {
        "parallel": first.parallelism,
        "num_trials": 0,
        "shard": first.shard,
        "devices": tuple(devices[: mesh.size]) if by_name else None,
        "num_devices": None if by_name else mesh.size,
    }
    if first.parallelism == "hybrid":
        chosen["mesh"] = mesh
    if mesh.pipeline > 1:
        chosen["num_micro_batches"] = first.num_micro_batches
    else:
        chosen |= dict.fromkeys(_OF_A_PIPELINE)
    if first.parallelism not in ("pipeline", "hybrid"):
        chosen["batch_normalization"] = None
    return dataclasses.replace(options, **chosen)


def plan_task(
    task: Task, num_devices: int, options: TrainOptions, devices: Sequence[str]
) -> Plan:
    """Plans a task on `num_devices` devices, and shows the progress on stderr.

    Args:
        task: The task.
        num_devices: The number of devices.
        options: The flags; `parallel` selects the plan: "auto", "model" or "pipeline".
        devices: The devices; used only for `--num_trials`.

    Raises:
        UsageError: If the model's layers cannot be determined.
        TaskError: If no mesh can be trained.
    """
    pipeline = options.of_pipeline()
    choices = Choices(
        batch_size=options.global_batch_size,
        device_memory=options.device_memory,
        num_micro_batches=options.num_micro_batches,
        schedule=pipeline["schedule"],
        chunks_per_device=pipeline["chunks_per_device"],
        recompute=pipeline["recompute"],
        balances=_BALANCES[options.parallel] if options.balance is None else (options.balance,),
        parallelism=options.parallel,
    )
    try:
        with Activity("building the model") as activity:
            batch = None
            if options.num_trials:  # Report mistakes in the data before measuring anything.
                activity.say("loading the data")
                batch = batch_of(task, options.global_batch_size)
            plan = make_plan(
                task.build_model,
                task.compile_model,
                num_devices,
                choices,
                batch_normalization=options.batch_normalization,
                progress=lambda text: activity.say(f"measuring {text}"),
            )
            if batch is None:
                return plan
            build = trial_builder(task, devices, options)
            return after_trials(plan, batch, build, options.num_trials, activity.say)
    except PlacementError as error:
        advice = "Or choose the parallelism yourself: --parallel=data supports any model."
        raise UsageError(f"{error}\n{advice}") from error


def nothing_fits(plan: Plan) -> str:
    """Returns the error for a plan of which no mesh fits: by how much, and what to do."""
    limit = size_text(plan.choices.device_memory)
    of_devices = f"{counted(plan.num_devices, 'device')} of {limit}"
    closest = min((c for c in plan.ranked if c.held_bytes is not None), key=lambda c: c.held_bytes)
    return (
        f"nothing fits {of_devices}: {closest.name} comes closest, {closest.why_not}. "
        f"{what_fits(plan)}"
    )


def what_fits(plan: Plan) -> str:
    """Returns the changes that would each make some mesh fit."""
    if not plan.would_fit:
        return "Use an optimizer with less state, or smaller layers."
    *others, last = map(str, plan.would_fit)
    return f"It would fit {'; '.join(others)}{'; or ' * bool(others)}{last}."


def trial_builder(
    task: Task, devices: Sequence[str], options: TrainOptions
) -> Callable[[Candidate], keras.Model]:
    """Returns a function that builds a task's model on a candidate's mesh, as in training.

    Args:
        task: The task.
        devices: The devices of the plan.
        options: The flags.
    """
    compile_model = compiling(task, options.jit_compile)

    def build(candidate: Candidate) -> keras.Model:
        mesh, cut = candidate.mesh, {}
        if mesh.pipeline > 1:
            cut = {
                **options.of_pipeline(),
                "num_micro_batches": candidate.num_micro_batches,
                "layers_per_stage": candidate.layers_per_stage,
            }
        if candidate.parallelism == "hybrid":
            cut |= {"mesh": mesh, "allow_independent_workers": True}
            cut |= {"batch_normalization": options.batch_normalization}
        mesh_devices = list(devices[: mesh.size])
        chosen = Parallelism(candidate.parallelism, mesh_devices, cut=cut, shard=candidate.shard)
        try:
            model = chosen.build(task.build_model)
        except UsageError as error:  # Only this mesh is unsuitable.
            raise ValueError(str(error)) from error
        compile_model(model)
        return model

    return build
