"""The builder `data_parallel`: trains a plain Keras model on all devices as on one."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfparallel import devices as device_lib
from tfparallel.asynchronous.asynchronous_model import extend_model as extend_asynchronous
from tfparallel.asynchronous.in_flight import steps_ahead
from tfparallel.asynchronous.servers import join
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.roles import Roles
from tfparallel.collectives import cross_device
from tfparallel.collectives.compression_name import CompressionName
from tfparallel.data.partition import check_weights
from tfparallel.layout.layout import SHARED_OUT, replicas_in_words
from tfparallel.replication import clone
from tfparallel.replication.data_parallel_model import extend_model, preparing
from tfparallel.replication.drop_in_strategies import MirroredStrategy, MultiWorkerMirroredStrategy
from tfparallel.replication.refusals import check_scope
from tfparallel.replication.sharding import build_in_shares
from tfparallel.replication.sync.option import Synchronization
from tfparallel.seams.distribute import DistributedVariable
from tfparallel.user_log import notice


def data_parallel(
    model_or_function: keras.Model | Callable[[], keras.Model],
    strategy: str | MirroredStrategy | MultiWorkerMirroredStrategy = "auto",
    *,
    devices: Sequence[str] | int | None = None,
    all_reduce: str | None = None,
    compression: str | None = None,
    sync: str = "every_step",
    shard: str | None = None,
    replica_weights: Sequence[int] | None = None,
    synchronize_batch_norm: bool = True,
    check_rows: bool = True,
    allow_independent_workers: bool = False,
) -> keras.Model:
    """Trains a plain Keras model on several devices, to the same weights as on one device.

    Use it when the model fits one device and training should be faster. For a batch of B examples
    on N replicas, replica k computes the rows of its part of B, and

        ∂J/∂θ = Σ_k g_k,    g_k = (∂y_k/∂θ)ᵀ ∂J/∂y_k

    where J is the loss of the whole batch. Batch sizes are global. You need no scope: `compile`,
    `fit`, `evaluate`, `predict`, callbacks and `save` work as usual, and the saved file is plain
    Keras. A line on stderr names the devices and the algorithm that sums the gradients.

    Args:
        model_or_function: A function that returns a Keras model, called under the strategy; or a
            built model, which is cloned there with its weights, frozen layers and compile state; or
            an instance of your own class that takes built models, such as
            `VAE(encoder, decoder)`, and stores them under the names of its constructor's arguments.
        strategy: `"auto"` for all workers of this process's job, and all devices of each; a
            `tfparallel.MirroredStrategy` for the devices of this process; or a
            `tfparallel.MultiWorkerMirroredStrategy`.
        devices: Names of the devices under `"auto"`, or their number; one replica each, such as
            `["GPU:0", "GPU:1"]`. Default: all GPUs, else all logical CPUs.
        all_reduce: Under `"auto"`, the algorithm that sums the gradients: in one process, as for
            `tfparallel.MirroredStrategy`, a name or `"auto"` for the fastest; between workers, as
            for `tfparallel.MultiWorkerMirroredStrategy`.
        compression: Under `"auto"`, how to compress gradients between workers, as for
            `tfparallel.MultiWorkerMirroredStrategy`: `"bf16"`, `"powersgd:2"`. Not exact. Within
            a process nothing is sent, so nothing is compressed. Default: no compression.
        sync: When the weights are updated and synchronized between workers. `"every_step"` sums
            gradients, and equals training on one device. `"accumulate:4"` updates every four steps
            by the sum of their gradients, and equals training with batches four times as large.
            `"accumulate:auto"` updates every N steps, and doubles N at the end of an epoch if the
            gradient noise scale says that a larger batch pays. `"adascale:4"` and
            `"adascale:auto"` also scale the learning rate by the gain of the larger batch, and
            advance its schedule by it; for SGD. `"local_sgd:8"` averages weights every 8 steps,
            between which each worker trains alone; `"post_local_sgd:1000,8"` does so from step
            1,000 on; `"diloco:8"` adds an outer step to each average. `"async"` never synchronizes:
            each worker updates weights on servers, with gradients that miss at most a few updates
            of the others, or as many as `"async:6"` says, in a job of
            `tfparallel launch --num_ps=1`. See `docs/synchronization.md`. Replicas in one process
            always agree.
        shard: What each of the N replicas of all workers keeps 1/N of; the weights come out the
            same. `"optimizer"`: the optimizer state. `"gradients"`: also the gradients that
            `sync="accumulate:4"` accumulates, at the cost of a sum over the workers in each step.
            `"parameters"`: also the weights and all gradients; layers gather them while they
            compute. For optimizers that update each element independently, such as Adam. Files
            hold the whole. Default: nothing.
        replica_weights: Shares of unequal devices, such as `[3, 1]`: the first replica computes
            three of every four rows. One whole number for each replica of all workers; the
            resulting weights are the same. Default: equal shares.
        synchronize_batch_norm: Whether batch normalization uses the moments of the global batch,
            as on one device. False uses the moments of each replica, which saves one small
            reduction per layer and is not exact.
        check_rows: Whether to refuse a model that mixes examples, for instance by subtracting
            the mean of the batch. The traced step must prove that each example is computed
            independently. False trains the model anyway, to other weights than on one device.
        allow_independent_workers: Whether several workers of one job may each train a separate
            model.

    Returns:
        A `keras.Model` of the user's class, extended. On one device it has no strategy and no
        overhead.

    Raises:
        ValueError: If the environment describes no valid cluster; a device is unknown or named
            twice; the algorithm cannot run on the devices; `compression`, `sync` or `shard` is
            unknown, or they exclude each other; the function returns no model; the model was built
            in another strategy's scope or cannot be cloned; or the call is inside such a scope.
        RuntimeError: If the workers of a job would each train a separate model, unless
            `allow_independent_workers`; or if the workers cannot connect.

    Example:
        >>> model = tfparallel.data_parallel(build_model, devices=["GPU:0", "GPU:1"])
        >>> model.compile(optimizer="adam", loss="mse")
        >>> model.fit(x, y, batch_size=64)

    References:
        The step is synchronous stochastic gradient descent: Jianmin Chen et al., "Revisiting
        Distributed Synchronous SGD", arXiv:1604.00981, 2016.
    """
    policy = Synchronization.parse(sync)
    check_scope(strategy, "`data_parallel`")
    if shard is not None:
        _check_shard(shard, sync, policy)
    if policy.is_async:
        _refuse_beside_async(
            sync,
            {"devices": devices, "all_reduce": all_reduce, "compression": compression}
            | {"shard": shard, "replica_weights": replica_weights}
            | {"strategy": None if strategy == "auto" else strategy},
        )
        return _build_asynchronous(model_or_function, policy)
    strategy = _resolve_strategy(
        strategy, devices, all_reduce, compression, allow_independent_workers
    )
    if shard == "parameters":
        _refuse_beside_shares(strategy)
    if isinstance(strategy, _OneDevice) and policy.accumulates:
        strategy = MirroredStrategy(device_lib.choose_devices(num_devices=1))
    if replica_weights is not None:
        _set_replica_weights(strategy, replica_weights)
    shard = shard if strategy.num_replicas > 1 else None
    is_function = not isinstance(model_or_function, keras.Model)
    if not is_function:
        _refuse_foreign_scope(model_or_function, strategy)
        prepare = preparing(strategy, shard is not None)
        model = clone.clone_under(model_or_function, strategy, prepare)
    else:
        model = _build(model_or_function, strategy, in_shares=shard == "parameters")
    model = extend_model(
        model,
        None if isinstance(strategy, _OneDevice) else strategy,
        synchronize_batch_norm=synchronize_batch_norm,
        check_rows=check_rows,
        sync=policy,
        shard=shard,
        made_by_function=is_function,
    )
    if model._is_chief:
        shares = "" if shard is None else f"; {SHARED_OUT[shard]}"
        notice(f"data_parallel: {replicas_in_words(model.layout)}{shares}.", once=True)
    return model


def _check_shard(shard: str, sync: str, policy: Synchronization) -> None:
    if shard not in SHARED_OUT:
        raise ValueError(
            f"`shard` must be one of {', '.join(map(repr, SHARED_OUT))}, or None. Received: "
            f"shard={shard!r}. Pass shard='parameters' to shard the weights, too."
        )
    if shard == "gradients" and not policy.accumulates:
        raise ValueError(
            "shard='gradients' shards the gradients that several steps accumulate, so it requires "
            f"sync='accumulate:N'. Received: shard='gradients', sync={sync!r}. Use "
            "sync='accumulate:N', or shard='optimizer', which also shards the gradients that "
            "`gradient_accumulation_steps` accumulates."
        )
    if policy.is_local:
        raise ValueError(
            "Workers that train on their own between averages need whole weights and optimizer "
            f"state; `shard` and this `sync` cannot be combined. Received: shard={shard!r}, "
            f"sync={sync!r}. Remove one of them."
        )


def _refuse_beside_shares(strategy) -> None:
    in_programs = getattr(strategy, "sums_in_programs", False)
    compression = getattr(strategy, "compression", None)
    if in_programs or compression:
        received = "all_reduce='xla'" if in_programs else f"compression={compression!r}"
        raise ValueError(
            "shard='parameters' reduces gradients uncompressed and outside of XLA's programs; it "
            "cannot be combined with `compression` or all_reduce='xla'. Received: "
            f"shard='parameters', {received}. Remove one of them."
        )


def _refuse_beside_async(sync: str, options: dict[str, Any]) -> None:
    received = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if received:
        raise ValueError(
            "Asynchronous workers do not sum gradients, and servers hold the weights and the "
            f"optimizer; sync={sync!r} cannot be combined with these options. Received: "
            f"{', '.join(received)}. Remove {'it' if len(received) == 1 else 'them'}."
        )


def _build_asynchronous(model_or_function, policy: Synchronization) -> keras.Model:
    roles = Roles.from_env()
    if roles is None:
        Cluster.from_env()  # Raises if TF_CONFIG is invalid.
        raise ValueError(
            "sync='async' needs a job with a chief, workers and parameter servers. A TF_CONFIG "
            "with a 'ps' list is required. Received: none. Start the job with `tfparallel launch "
            "--nproc_per_node=2 --num_ps=1 -- …`."
        )
    if policy.staleness is not None:
        steps_ahead(policy.staleness, len(roles.workers))  # Checked before waiting for the job.
    servers = join(roles)
    if not isinstance(model_or_function, keras.Model):
        model = _build(model_or_function, servers)
    elif model_or_function.compiled:
        raise ValueError(
            "Under sync='async', the servers hold the optimizer. A function, or a model that is "
            f"not compiled yet, is required. Received: model '{model_or_function.name}', already "
            "compiled. Pass the function that builds it, and compile the returned model."
        )
    else:
        model = clone.clone_under(model_or_function, servers)
    model = extend_asynchronous(model, servers, policy.staleness)
    workers, number = len(roles.workers), len(roles.servers)
    notice(
        f"data_parallel: asynchronous, {workers} worker{'s' * (workers > 1)}; the weights are on "
        f"{number} server{'s' * (number > 1)}.",
        once=True,
    )
    return model


class _OneDevice:
    """Stands in for a strategy on TensorFlow's default device, which needs none."""

    num_replicas = 1

    def scope(self):
        return contextlib.nullcontext()


def _resolve_strategy(strategy, devices, all_reduce, compression, allow_independent_workers):
    cluster = None if allow_independent_workers else Cluster.from_env()
    if isinstance(strategy, MultiWorkerMirroredStrategy | MirroredStrategy):
        _refuse_independent_workers(strategy, cluster)
        options = {"devices": devices, "all_reduce": all_reduce, "compression": compression}
        for name, value in options.items():
            if value is not None:
                raise ValueError(
                    "A strategy already defines its devices, all-reduce and compression; pass "
                    "these options or a strategy, not both. Received: strategy on "
                    f"{list(strategy.devices)}, {name}={value!r}. Remove `{name}`."
                )
        return strategy
    if strategy != "auto":
        if isinstance(strategy, int | list | tuple):
            fix = f"Pass devices as `devices={strategy!r}`."
        elif isinstance(strategy, str):
            fix = "Leave out `strategy`: 'auto' takes the devices and all workers of the job."
        else:
            fix = (
                "TensorFlow's own strategies clip and average on each replica; replace "
                "`tf.distribute.` with `tfparallel.`."
            )
        raise ValueError(
            "`strategy` must be 'auto', a `tfparallel.MirroredStrategy` or a "
            "`tfparallel.MultiWorkerMirroredStrategy`. Received: "
            f"strategy={strategy!r} (of type {type(strategy).__name__}). {fix}"
        )
    if cluster is not None and cluster.num_workers > 1:
        return MultiWorkerMirroredStrategy.of_process(
            devices=devices, all_reduce=all_reduce, compression=compression
        )
    CompressionName.parse(compression)  # Raises for a wrong name in a single process, too.
    names = device_lib.choose_devices(devices=devices)
    default = (device_lib.list_devices("GPU") or device_lib.list_devices("CPU"))[:1]
    if names != default:
        return MirroredStrategy(names, all_reduce=all_reduce)
    if all_reduce not in (None, "auto"):
        cross_device.make(all_reduce, names)  # Raises for a wrong name on a single device, too.
    return _OneDevice()


def _set_replica_weights(strategy, replica_weights) -> None:
    if isinstance(strategy, _OneDevice):
        check_weights(replica_weights, 1)
    else:
        strategy.replica_weights = replica_weights


def _build(function, strategy, *, in_shares: bool = False) -> keras.Model:
    if not callable(function):
        raise ValueError(
            "`data_parallel` needs a function that builds a Keras model, or a built model. "
            f"Received: {function!r} (of type {type(function).__name__}). Pass the function "
            "itself, `data_parallel(build_model)`, not its name."
        )
    if in_shares:
        model = build_in_shares(function, strategy)
    else:
        with strategy.scope():
            model = function()
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"The function given to `data_parallel` must return a Keras model. Received: {model!r} "
            f"(of type {type(model).__name__}) from {getattr(function, '__name__', function)}. "
            "Look for a missing `return model`."
        )
    return model


def _refuse_foreign_scope(model, strategy) -> None:
    for variable in model.variables:
        owner = getattr(variable.value, "distribute_strategy", None)
        if isinstance(variable.value, DistributedVariable) and owner is not strategy:
            raise ValueError(
                f"Model '{model.name}' was built in the scope of another strategy. A model built "
                f"outside any scope is required. Received: variable '{variable.path}' of a "
                f"{type(owner).__name__}. Build the model without a scope, or pass the function "
                "that builds it."
            )


def _refuse_independent_workers(strategy, cluster) -> None:
    is_local = isinstance(strategy, MirroredStrategy)
    if is_local and cluster is not None and cluster.num_workers > 1:
        raise RuntimeError(
            f"This process is one of {cluster.num_workers} workers ({cluster.source}), and a "
            "MirroredStrategy uses only the devices of its own process: each worker would train a "
            "separate model. A strategy for all workers, or your explicit consent, is required. "
            f"Received: a MirroredStrategy in a job of {cluster.num_workers} workers. Remove "
            "`strategy`, or pass allow_independent_workers=True."
        )
