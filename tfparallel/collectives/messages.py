"""Messages between two workers: `send` and `recv`.

Both sides first meet in TensorFlow's coordination service, a key-value store on worker 0. There the
sender says what it has and the receiver answers, each with a deadline, so neither one enters a
transfer alone, and both learn of a mistake:

    sender                              receiver
    offer: types and shapes    ──>      compares with what it expects
    begins to send             <──      answer: "taken", or what is wrong
    tensors                    ══>      returns them

A sender that gives up withdraws: answer and withdrawal are the same key, which only one of the two
can set.

S bytes take the two messages of the meeting, over worker 0, and α + Sβ: `MPI_Isend` and
`MPI_Irecv` through MPI; else TensorFlow's broadcast in a group of two, over gRPC. Between GPUs they
pass through the hosts. A message has no gradient: the tape of one worker does not know the other's.
"""

import collections
import itertools
import json
import time

import numpy as np
import tensorflow as tf

from tfparallel.cluster.differences import name_workers
from tfparallel.collectives.chief_alone import check_all_take_part
from tfparallel.collectives.group import DTYPES, find, is_index, tensor_of
from tfparallel.collectives.in_replica import Replicas
from tfparallel.collectives.lost_worker import naming_lost_worker
from tfparallel.collectives.mpi.workers import MpiProcessGroup
from tfparallel.collectives.ops import Value
from tfparallel.collectives.packing import movable, restored
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.flight.marks import around_python
from tfparallel.seams.tensorflow import coordination_service, leaves_with_paths

_FIRST_PAIR_KEY = 2**28  # Above the keys of groups, which are counted up.
_WITHDRAWN, _TAKEN = "withdrawn", "taken"
_LOOK_SECONDS = 0.05
# How many messages have passed, by sender, receiver and tag; equal on both.
_passed: collections.Counter = collections.Counter()
_attempts = itertools.count()
_signatures: dict[tuple, int] = {}


def send(value: Value, dest: int, tag: int = 0, timeout_seconds: float = 1800.0) -> None:
    """Sends a value to one other worker, and returns once that worker has taken it.

    Two workers that both send first wait for each other until the deadline: let one of them receive
    first. Cost: two short messages over worker 0, then α + Sβ. There is no gradient.

    Args:
        value: Tensors of any shapes, in any structure.
        dest: The index of the worker that receives it.
        tag: Distinguishes messages between the same two workers.
        timeout_seconds: How long to wait for the receiver.

    Raises:
        ValueError: For a dtype that cannot be sent, if `dest` is no other worker, if `tag` is
            negative, if `timeout_seconds` is not positive, or if the receiver expects something
            else.
        RuntimeError: If the receiver does not call `recv` in time or has died; in a replica or a
            `tf.function`; in a multi-worker job, before a strategy has connected the workers.

    Example:
        >>> if tfparallel.worker_index() == 0:
        ...     tfparallel.send(weights, dest=1)
        ... elif tfparallel.worker_index() == 1:
        ...     weights = tfparallel.recv(weights, source=0)
    """
    workers = _check("send", "dest", dest, tag, timeout_seconds)
    tensors = [tensor_of(leaf) for leaf in tf.nest.flatten(value)]
    _check_dtypes(tensors)
    send_between(workers, tensors, int(dest), tag, timeout_seconds, _described(value, tensors))


def recv(like: Value, source: int, tag: int = 0, timeout_seconds: float = 1800.0) -> Value:
    """Receives the value that another worker passes to `send`.

    Args:
        like: The expected structure, shapes and dtypes: tensors, whose content is not used, or
            `tf.TensorSpec`s, in which an axis may have any size.
        source: The index of the worker that sends it.
        tag: The tag of the message.
        timeout_seconds: How long to wait for the sender.

    Returns:
        The value, in the structure of `like`.

    Raises:
        ValueError: As for `send`; or if what is sent differs from `like`, on both workers.
        RuntimeError: If the sender does not call `send` in time or has died; as for `send`.

    Example:
        >>> rows = tfparallel.recv(tf.TensorSpec([None, 8]), source=0)
    """
    workers = _check("recv", "source", source, tag, timeout_seconds)
    specs = [_spec(leaf) for leaf in tf.nest.flatten(like)]
    _check_dtypes(specs)
    described = _described(like, specs)
    tensors = receive_between(workers, specs, int(source), tag, timeout_seconds, described)
    return tf.nest.pack_sequence_as(like, tensors)


def send_between(workers, tensors, dest, tag, timeout_seconds, described) -> None:
    """Sends tensors to another worker of a `ProcessGroup`; see `send`."""
    me, deadline = workers.worker_index, time.monotonic() + timeout_seconds
    service, attempt, message = coordination_service(), next(_attempts), (me, dest, tag)
    name = f"tfparallel/message/{me}/{dest}/{tag}"
    number = _passed[message]
    offer_key, answer_key = f"{name}/offer/{number}", f"{name}/answer/{number}/{attempt}"
    shapes = [[tensor.dtype.name, tensor.shape.as_list()] for tensor in tensors]
    keys = [_instance_key(me, dest, tensor) for tensor in tensors]
    offer = {"attempt": attempt, "tensors": shapes, "keys": keys, "described": described}
    with around_python(f"send to {dest}"), naming_lost_worker():
        service.set_config_key_value(offer_key, json.dumps(offer))
        answer = _look(service, answer_key, deadline)
        if answer is None:
            try:
                service.set_config_key_value(answer_key, _WITHDRAWN)
            except tf.errors.AlreadyExistsError:  # The receiver has just answered.
                answer = service.get_config_key_value(answer_key)
            else:
                service.delete_config_key_value(offer_key)
                raise _late(dest, "recv", f"source={me}, tag={tag}", timeout_seconds)
        _passed[message] += 1
        if answer != _TAKEN:
            service.delete_config_key_value(offer_key)
            service.delete_config_key_value(answer_key)
            raise ValueError(answer)
        try:
            for tensor, key in zip(tensors, keys, strict=True):
                _push(workers, tensor, dest, key, _seconds_to(deadline))
        except tf.errors.DeadlineExceededError as error:
            raise _late(dest, "recv", f"source={me}, tag={tag}", timeout_seconds) from error


def receive_between(workers, specs, source, tag, timeout_seconds, described) -> list[tf.Tensor]:
    """Receives tensors from another worker of a `ProcessGroup`; see `recv`."""
    me, deadline = workers.worker_index, time.monotonic() + timeout_seconds
    service, message = coordination_service(), (source, me, tag)
    name = f"tfparallel/message/{source}/{me}/{tag}"
    number = _passed[message]
    offer_key = f"{name}/offer/{number}"
    with around_python(f"recv from {source}"), naming_lost_worker():
        while True:
            text = _look(service, offer_key, deadline)
            if text is None:
                raise _late(source, "send", f"dest={me}, tag={tag}", timeout_seconds)
            offer = json.loads(text)
            answer_key = f"{name}/answer/{number}/{offer['attempt']}"
            sent = [tf.TensorSpec(shape, dtype) for dtype, shape in offer["tensors"]]
            problem = _difference(source, me, sent, offer["described"], specs, described)
            try:
                service.set_config_key_value(answer_key, problem or _TAKEN)
            except tf.errors.AlreadyExistsError:  # Withdrawn; its key is about to go.
                time.sleep(_LOOK_SECONDS)
                continue
            break
        _passed[message] += 1
        if problem:
            raise ValueError(problem)
        try:
            received = [
                _pull(workers, spec, source, key, _seconds_to(deadline))
                for spec, key in zip(sent, offer["keys"], strict=True)
            ]
        except tf.errors.DeadlineExceededError as error:
            raise _late(source, "send", f"dest={me}, tag={tag}", timeout_seconds) from error
        service.delete_config_key_value(offer_key)
        service.delete_config_key_value(answer_key)
    return received


def _check(name, role, peer, tag, timeout_seconds) -> ProcessGroup:
    everyone = find()
    if isinstance(everyone, Replicas) or not tf.executing_eagerly():
        raise RuntimeError(
            f"`tfparallel.{name}` blocks a worker's Python program. It must be called outside "
            "replicas and outside any `tf.function`. Received: a call inside one. Use "
            "`tfparallel.all_to_all` or `scatter` there."
        )
    check_all_take_part()
    problems = []
    others = [worker for worker in everyone.members if worker != everyone.rank]
    if not is_index(peer) or peer not in others:
        which = f"the index of another worker: {name_workers(others)}" if others else "another one"
        problems.append(
            f"`{role}` must be {which}. Received: {role}={peer!r} on worker {everyone.rank} of "
            f"{everyone.num_ranks}."
        )
    if not is_index(tag) or tag < 0:
        problems.append(f"`tag` must be an integer from 0. Received: tag={tag!r}.")
    if not 0 < timeout_seconds < float("inf"):
        problems.append(
            "`timeout_seconds` must be a positive number of seconds. Received: "
            f"timeout_seconds={timeout_seconds!r}. Omit it to wait up to half an hour."
        )
    if problems:
        raise ValueError(f"`tfparallel.{name}` cannot be called so. {' '.join(problems)}")
    return everyone.group


def _check_dtypes(tensors) -> None:
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise ValueError(
                "Messages hold numeric and boolean tensors. Received: a tensor of type "
                f"{tensor.dtype.name}. Send numbers (an index into a vocabulary, for strings)."
            )


def _spec(leaf) -> tf.TensorSpec:
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    tensor = tensor_of(leaf)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _described(value, tensors) -> str:
    paths = [path for path, _ in leaves_with_paths(value)]
    parts = [
        (f"{path}: " if path else "") + f"{tensor.dtype.name} {tuple(tensor.shape)}"
        for path, tensor in zip(paths, tensors, strict=True)
    ]
    return ", ".join(parts) or "nothing"


def _difference(source, me, sent, sent_described, specs, described) -> str:
    fits = len(sent) == len(specs) and all(
        one.dtype == other.dtype and other.shape.is_compatible_with(one.shape)
        for one, other in zip(sent, specs, strict=True)
    )
    if fits:
        return ""
    return (
        "The receiver must expect what is sent: the same number of tensors, dtypes and shapes. "
        f"Received: worker {source} sends {sent_described}; worker {me} expects {described}. Pass "
        "`like=` of these shapes to `tfparallel.recv`, with None for a size that varies."
    )


def _look(service, key, deadline) -> str | None:
    """Returns the value of a key as soon as it is set; None at the deadline."""
    try:
        left_ms = max(1, round(1000 * (deadline - time.monotonic())))
        value = service.get_config_key_value(key, timeout_in_ms=left_ms)
        return value.decode() if isinstance(value, bytes) else value
    except tf.errors.DeadlineExceededError:
        return None


def _seconds_to(deadline) -> float:
    return max(deadline - time.monotonic(), 1.0)


def _late(peer, call, arguments, timeout_seconds) -> RuntimeError:
    return RuntimeError(
        f"Worker {peer} did not call or finish `tfparallel.{call}({arguments})` within "
        f"{timeout_seconds:g} s. Both workers are required. Received: no answer from worker {peer}."
        " Check what it was doing and its tag, or allow more time with `timeout_seconds`; if both "
        "send first, let one receive first."
    )


def _instance_key(me, dest, tensor) -> int:
    """Returns the sender's key of a transfer, which TensorFlow binds to a type, size and sender."""
    signature = (me, dest, tensor.dtype, tensor.shape.num_elements())
    return 2 * _signatures.setdefault(signature, len(_signatures)) + (me > dest)


def _transfer(workers, peer, key, seconds) -> dict:
    low, high = sorted((workers.worker_index, peer))
    return {
        "group_size": 2,
        "group_key": _FIRST_PAIR_KEY + low * workers.num_workers + high,
        "instance_key": key,
        "communication_hint": "ring",
        "timeout_seconds": seconds,
    }


def _push(workers, tensor, dest, key, seconds) -> None:
    if not tensor.shape.num_elements():
        return
    if isinstance(workers, MpiProcessGroup):
        workers.communicator.send(tensor.numpy(), dest, seconds)
        return
    with tf.device("CPU:0"):
        flat = tf.reshape(movable(tensor), [-1])
        tf.raw_ops.CollectiveBcastSendV2(input=flat, **_transfer(workers, dest, key, seconds))


def _pull(workers, spec, source, key, seconds) -> tf.Tensor:
    with tf.device("CPU:0"):
        if not spec.shape.num_elements():
            return tf.zeros(spec.shape, spec.dtype)
        if isinstance(workers, MpiProcessGroup):
            dtype = np.dtype(spec.dtype.as_numpy_dtype)
            array = workers.communicator.receive(spec.shape.as_list(), dtype, source, seconds)
            return tf.constant(array)
        moved = movable(tf.zeros([1], spec.dtype)).dtype
        flat = tf.raw_ops.CollectiveBcastRecvV2(
            shape=[spec.shape.num_elements()],
            T=moved,
            **_transfer(workers, source, key, seconds),
        )
        return restored(tf.reshape(flat, spec.shape), spec.dtype)
