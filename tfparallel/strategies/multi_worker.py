"""Copies of the model on all devices of several workers, updated in step.

Relies on internals of TensorFlow (`CollectiveAllReduceExtended`), as `program.py` does, and for two
more reasons: TensorFlow uses only one CPU device per worker; and Keras's trainer, if the strategy
has several workers, reduces the results of a program, which are already global (keras#20585).
"""

import contextlib
import json
import os
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfparallel import devices as device_lib
from tfparallel.cluster.address import split_address
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.environment import ALL_REDUCE
from tfparallel.collectives import transport, transport_selection
from tfparallel.collectives.algorithm_selection import Choice
from tfparallel.collectives.compression import compression_of
from tfparallel.collectives.coordination import leave_in_order
from tfparallel.collectives.in_replica import join_rows
from tfparallel.collectives.malloc_settings import keep_freed_memory
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.device_names import canonical
from tfparallel.join_job import join_job, serving
from tfparallel.seams.distribute import (
    CollectiveAllReduceExtended,
    Mirrored,
    regroup,
    strategy_of,
    worker_of,
)
from tfparallel.seams.tensorflow import global_seed, runtime_has_started
from tfparallel.startup import has_nvidia_gpu
from tfparallel.strategies import keras_trainer
from tfparallel.strategies.early_init import early_start
from tfparallel.strategies.program import ProgramExtended, ProgramStrategy
from tfparallel.user_log import notice

_STALL_SECONDS = 1800.0
# TensorFlow broadcasts initial values of six dtypes; a wider one holds these values exactly.
_BROADCAST_AS = {tf.bfloat16: tf.float32, tf.uint32: tf.int64} | dict.fromkeys(
    (tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
)


class _MultiWorkerExtended(ProgramExtended, CollectiveAllReduceExtended):
    """This worker's devices and its peers, from the view of a program."""

    def __init__(self, strategy, devices, **kwargs):
        self._device_names = devices
        super().__init__(strategy, **kwargs)

    def _initialize_local_devices(self, cluster_resolver, worker_device):
        # Looked up here, after the environment was set to this worker's GPUs.
        names = device_lib.choose_devices(devices=self._device_names)
        return (
            tuple(f"{worker_device}{device_lib.to_tensorflow_name(name)}" for name in names),
            names[0].partition(":")[0],
        )

    def _create_variable(self, next_creator, **kwargs):
        # The chief sends initial values to the others, which must request the same.
        try:
            return super()._create_variable(next_creator, **kwargs)
        except tf.errors.InvalidArgumentError as error:
            if "mismatch in the collective" not in str(error):
                raise
            shapes = re.findall(r"expected shape (\[[^\]]*\])", error.message)[:2]
            raise RuntimeError(
                "The workers build different models; every worker must create the same variables "
                f"in the same order. Received: {kwargs.get('name') or 'a variable'} of shapes "
                f"{' and '.join(shapes)}. Run the same program on all workers."
            ) from error

    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        arguments = (replica_id, device, primary_var)
        dtype = tf.as_dtype(kwargs["dtype"]) if kwargs.get("dtype") is not None else None
        if replica_id or dtype not in _BROADCAST_AS:
            return super()._get_variable_creator_initial_value(*arguments, **kwargs)
        wider, value = _BROADCAST_AS[dtype], kwargs["initial_value"]

        def widened():
            initial_value = value() if callable(value) else value
            return tf.cast(tf.convert_to_tensor(initial_value, dtype), wider)

        kwargs |= {"initial_value": widened, "dtype": wider}
        broadcast = super()._get_variable_creator_initial_value(*arguments, **kwargs)
        return lambda: tf.cast(broadcast(), dtype)

    def _gather_to_implementation(self, value, destinations, axis, options):
        # TensorFlow joins the workers in the lexical order of their names: 0, 1, 10, 2, …
        strategy = strategy_of(self)
        if strategy.workers is None:
            return super()._gather_to_implementation(value, destinations, axis, options)
        move = tf.experimental.numpy.moveaxis
        parts = strategy.experimental_local_results(value)
        joined, _ = join_rows(strategy, [move(part, axis, 0) for part in parts])
        copies = []
        for device in self.worker_devices:
            with tf.device(device):
                copies.append(move(joined, 0, axis))
        return regroup(copies, Mirrored)

    def _in_multi_worker_mode(self):
        return super()._in_multi_worker_mode() and keras_trainer.calling_model() is None


class MultiWorkerMirroredStrategy(ProgramStrategy, tf.distribute.MultiWorkerMirroredStrategy):
    """Replicates the model on all workers; see `tfparallel.MultiWorkerMirroredStrategy`."""

    all_reduce_choice: Choice | None = None  # The transport between the workers, and why.
    _of_process = None  # The strategy of this process, which can start only one.
    _to_choose: transport_selection.TransportChoice | None = None

    def __new__(cls, *args, **kwargs):
        """Creates a strategy, or returns that of the process."""
        return cls._of_process or super().__new__(cls)

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        devices: Sequence[str] | int | None = None,
        start_timeout: float = 120.0,
        stall_timeout: float = _STALL_SECONDS,
        all_reduce: str | None = None,
        bucket_bytes: int | None = None,
        compression: str | None = None,
        calibrate: bool = True,
        facts: Mapping[str, Any] | None = None,
    ):
        if self is MultiWorkerMirroredStrategy._of_process:
            passed = {"cluster_resolver": cluster_resolver, "devices": devices}
            passed |= {"communication_options": communication_options, "all_reduce": all_reduce}
            passed |= {"compression": compression, "bucket_bytes": bucket_bytes, "facts": facts}
            if stall_timeout not in (_STALL_SECONDS, self.stall_timeout):
                passed["stall_timeout"] = stall_timeout
            _refuse_anew({name: value for name, value in passed.items() if value is not None})
            return
        if not stall_timeout > 0:
            raise ValueError(
                "`stall_timeout` must be a number of seconds above 0. Received: "
                f"stall_timeout={stall_timeout}."
            )
        if bucket_bytes is not None and not bucket_bytes >= 1:
            raise ValueError(
                "`bucket_bytes` must be a number of bytes of at least 1, or None for one bucket. "
                f"Received: bucket_bytes={bucket_bytes!r}."
            )
        self.compression, compressed = compression, compression_of(compression)
        argument, named = all_reduce, transport.named_by(communication_options)
        all_reduce = transport.chosen(all_reduce or named)
        _refuse_late_start()
        self.stall_timeout = stall_timeout
        if cluster_resolver is None:
            cluster = Cluster.from_env()
            if devices is None and has_nvidia_gpu():
                os.environ.update(cluster.device_environment())
            cluster_resolver = _resolver_of(cluster)
        num_devices = len(device_lib.choose_devices(devices=devices))
        same = {"all_reduce": all_reduce, "bucket_bytes": bucket_bytes, "calibrate": calibrate}
        same["compression"] = compression
        facts = {"devices per worker": num_devices, **same, **(facts or {})}
        cluster_resolver, server = _meet(cluster_resolver, facts, start_timeout)
        options = transport.options(all_reduce, communication_options)
        with server:
            extended = _MultiWorkerExtended(
                self,
                devices=devices,
                cluster_resolver=cluster_resolver,
                communication_options=options,
            )
        tf.distribute.Strategy.__init__(self, extended)
        index, number = worker_of(extended)
        if number > 1:
            chiefs, others = _addresses(cluster_resolver)
            self.workers = ProcessGroup(
                number,
                index,
                self.devices[0],
                timeout_seconds=options.timeout_seconds or 0.0,
                first_host=split_address((chiefs + others)[0])[0],
            )
            self.workers.learn_ranks()
            leave_in_order(self.workers)
            keep_freed_memory()
            _recommend_a_process_for_each_gpu(self.devices, self.workers.worker_index)
            self.workers.bucket_bytes, self.workers.compression = bucket_bytes, compressed
            if all_reduce is None:
                self.workers, self.all_reduce_choice = transport_selection.by_default(self.workers)
            else:
                self.workers = transport.joined(self.workers, all_reduce)
                self.all_reduce_choice = _choice_of(self.workers, argument, named, all_reduce)
            ProcessGroup.of_process = self.workers
            _agree_on_seed(self.workers)
            if all_reduce == "auto":
                self._to_choose = transport_selection.TransportChoice(self.workers, calibrate)
        names = tuple(name.rpartition("/device:")[2] for name in self.devices)
        self._made_with = {"devices": names, "all_reduce": argument, "compression": compression}
        MultiWorkerMirroredStrategy._of_process = self

    @classmethod
    def of_process(cls, **kwargs) -> "MultiWorkerMirroredStrategy":
        """Returns the strategy that this process started, or starts one.

        Raises:
            ValueError: If it was started with other devices or another all-reduce.
        """
        strategy = cls._of_process
        if strategy is None:
            return cls(**kwargs)
        devices = kwargs.get("devices")
        if devices is not None:
            kwargs["devices"] = tuple(device_lib.choose_devices(devices=devices))
        for name, present in strategy._made_with.items():
            value = kwargs.get(name)
            if value is not None and value != present:
                raise ValueError(
                    "A job has one strategy, whose options are fixed when it is created. Received: "
                    f"{name}={value!r} in a process whose strategy has {present!r}. Set the option "
                    "where the strategy is created: in `tfparallel.init(...)`, or in the first "
                    "call."
                )
        return strategy

    @property
    def all_reduce_is_open(self) -> bool:
        """Whether "auto" has not chosen yet."""
        return self._to_choose is not None

    def _how_chosen(self) -> str:
        return self._to_choose.how

    def _all_devices(self) -> list[str]:
        jobs = self.cluster_resolver.cluster_spec().as_dict()
        tasks = [
            f"/job:{job}/task:{task}"
            for job in ("chief", "worker")
            for task in range(len(jobs.get(job, ())))
        ]
        names = [name.rpartition("/device:")[2] for name in self.devices]
        return [canonical(f"{task}/device:{name}") for task in tasks for name in names] or names

    def choose_all_reduce(self, variables: Sequence[keras.Variable]) -> None:
        """Under "auto", chooses the fastest transport for the gradients of variables, once.

        All workers must call it at the same point of their program.
        """
        size_bytes = sum(v.shape.num_elements() * tf.as_dtype(v.dtype).size for v in variables)
        if self._to_choose is None or not size_bytes:
            return
        self.workers, self.all_reduce_choice = self._to_choose.choose(size_bytes)
        ProcessGroup.of_process = self.workers
        self._to_choose = None
        if self.workers.worker_index == 0:
            notice(f"all-reduce: {self.all_reduce_choice}")


def _resolver_of(cluster: Cluster):
    """Converts a cluster to TensorFlow's resolver."""
    if cluster.num_workers == 1:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    jobs = json.loads(cluster.to_tf_config())["cluster"]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        rpc_layer="grpc",
    )


def _meet(resolver, facts, start_timeout):
    """Waits for the other workers with a deadline; TensorFlow itself would wait forever.

    Returns the resolver for TensorFlow's start, and the context to start it in.
    """
    chiefs, others = _addresses(resolver)
    workers = chiefs + others
    if len(workers) < 2 or resolver.task_type not in ("chief", "worker"):
        return resolver, contextlib.nullcontext()
    index = resolver.task_id + (len(chiefs) if resolver.task_type == "worker" else 0)
    addresses = join_job(workers, index, facts, start_timeout)
    if addresses != workers:
        by_job = {"chief": addresses[: len(chiefs)], "worker": addresses[len(chiefs) :]}
        jobs = resolver.cluster_spec().as_dict() | {
            job: by_job[job] for job in by_job if by_job[job]
        }
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(jobs),
            task_type=resolver.task_type,
            task_id=resolver.task_id,
            rpc_layer=resolver.rpc_layer or "grpc",
        )
    return resolver, serving(addresses, index)


def _recommend_a_process_for_each_gpu(devices, worker_index) -> None:
    if worker_index == 0 and len(devices) > 1 and "GPU" in devices[0]:
        logging.warning(
            "Each worker has %d GPUs, but only the first one sums gradients with the other "
            "workers. One process per GPU uses all their links: `tfparallel launch "
            "--nproc_per_node=%d`.",
            *(len(devices), len(devices)),
        )


def _choice_of(workers, argument, named, all_reduce) -> Choice:
    source, why = "argument", f"{ALL_REDUCE}={all_reduce}"
    if all_reduce == "auto":
        source, why = "default", "it is chosen before the first `fit`"
    elif argument == all_reduce:
        why = "it was requested"
    elif named == all_reduce:
        why = "`communication_options` request it"
    return Choice(workers.transport, source, why, implementation=workers.implementation)


def _addresses(resolver) -> tuple[list[str], list[str]]:
    """The addresses of the chief, if the cluster has one, and of the other workers."""
    jobs = resolver.cluster_spec().as_dict()
    return list(jobs.get("chief", [])), list(jobs.get("worker", []))


def _refuse_late_start() -> None:
    if runtime_has_started():
        first = early_start() or "an operation has run, a layer was built or devices were listed"
        raise RuntimeError(
            "The workers of a job must connect before TensorFlow's runtime starts, but it has "
            f"already started. Received: {first}. Call `tfparallel.init()` above it, directly "
            "below the imports (in a notebook, restart the kernel first)."
        )


def _refuse_anew(options) -> None:
    if options:
        received = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            "A process can have only one MultiWorkerMirroredStrategy, and it already exists. "
            f"Received: {received}. Set these options where the strategy is created, or in "
            "`tfparallel.init(...)`."
        )


def _agree_on_seed(workers: ProcessGroup) -> None:
    """Gives all workers the same state of Python's, NumPy's and TensorFlow's random numbers.

    Workers that already agree, because each called `keras.utils.set_random_seed`, keep their
    state, and train to the same weights as one device from that seed.
    """
    state = (random.getstate(), np.random.get_state(), global_seed())
    checksum = zlib.crc32(repr(state).encode()) >> 1
    states = workers.all_gather([tf.constant([checksum], tf.int32)], [1] * workers.num_workers)[0]
    if len(set(states.numpy().tolist())) > 1:
        keras.utils.set_random_seed(int(states[0]))
