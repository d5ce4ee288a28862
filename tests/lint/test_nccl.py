"""What joins GPUs, traced without one: NCCL's types, and one order on every device."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel.collectives import between_workers, choice, cross_device
from tfparallel.collectives.between_workers import WorkerGroup
from tfparallel.collectives.nccl import refusal, refusal_between
from tfparallel.collectives.reducer import Reducer

GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
OF_NCCL = (tf.float16, tf.float32, tf.float64)
COLLECTIVES = ("CollectiveReduceV2", "CollectiveGatherV2")


def collectives_of(function):
    graph = tf.function(function, autograph=False).get_concrete_function().graph
    return [op for op in graph.get_operations() if op.type in COLLECTIVES]


def program_of(group):
    """What a program does with its workers: sums of every type, joins, and a user's calls."""

    def program():
        floats = [tf.ones([3], dtype) for dtype in (tf.float32, tf.float64, tf.bfloat16)]
        terms = [(tf.ones([2, 2]),), (tf.ones([5], tf.bfloat16),)]
        totals, beside = Reducer(None, group).totals(terms, list, [tf.ones([]), tf.constant(1)])
        joined = group.all_gather_uneven([tf.ones([4, 2]), tf.constant([True] * 4)])
        return [
            *group.all_reduce([*floats, tf.constant([1, 2]), tf.constant([3], tf.int64)]),
            *totals,
            *beside,
            *joined,
            *group.for_users.all_reduce([tf.ones([7])]),
            *group.broadcast([tf.ones([2]), tf.constant([True])]),
        ]

    return program


def is_behind(later, earlier):
    seen, waiting = set(), [later]
    while waiting:
        op = waiting.pop()
        if op is earlier:
            return True
        behind = [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
        waiting += [other for other in behind if other not in seen]
        seen.update(behind)
    return False


def faults(operations):
    """What NCCL would not do, or not do twice in the same order."""
    found = []
    for op in operations:
        hint, dtype = op.get_attr("communication_hint").decode(), op.get_attr("T")
        if dtype.is_floating and (hint != "nccl" or op.device != GPU or dtype not in OF_NCCL):
            found.append(f"{op.name} of {dtype.name} by {hint} on {op.device}")
        if not dtype.is_floating and (hint != "ring" or op.device != HOST):
            found.append(f"{op.name} of {dtype.name} by {hint} on {op.device}")
    for device in (GPU, HOST):
        own = [op for op in operations if op.device == device]
        found += [
            f"{later.name} is not behind {earlier.name}"
            for earlier, later in itertools.pairwise(own)
            if not is_behind(later, earlier)
        ]
    return found


@pytest.fixture(name="group")
def a_group():
    return WorkerGroup(2, 0, GPU).with_transport("nccl")


def test_gpus_are_joined_by_nccl_in_one_order(group):
    operations = collectives_of(program_of(group))
    assert len(operations) > 10 and faults(operations) == []


def test_the_lint_sees_a_missing_hint():
    assert any(
        "by ring" in fault for fault in faults(collectives_of(program_of(WorkerGroup(2, 0, GPU))))
    )


def test_the_lint_sees_a_second_order(group):
    users = group.for_users
    with tf.device(GPU):
        users._ordering_tokens = {GPU: tf.Variable(0.0), HOST: tf.Variable(0.0)}
    assert any("is not behind" in fault for fault in faults(collectives_of(program_of(group))))


def test_the_lint_sees_a_type_that_nccl_lacks(group, monkeypatch):
    monkeypatch.setattr(between_workers, "_WIDENED", ())
    found = collectives_of(lambda: group.all_reduce([tf.ones([3], tf.bfloat16)]))
    assert any("bfloat16" in fault for fault in faults(found))


def test_a_vector_has_no_more_elements_than_31_bits_count(monkeypatch, group):
    monkeypatch.setattr(between_workers, "_MAX_ELEMENTS", 10)
    found = collectives_of(lambda: group.all_reduce([tf.ones([n]) for n in (4, 5, 3, 20, 6)]))
    assert [op.inputs[0].shape[0] for op in found] == [9, 3, 20, 6]


def traced_with(ops, dtype):
    """The operations of a training step whose replicas are summed by NCCL."""
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    strategy.all_reduce_ops, strategy.all_reduce_name = ops, "nccl"
    plain = keras.Sequential(
        [keras.Input((4,), dtype=dtype), layers.Dense(8, dtype=dtype), layers.Dense(2, dtype=dtype)]
    )
    model = tfparallel.data_parallel(plain, strategy=strategy)
    model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.ones((6, 4)), np.ones((6, 2)))).batch(6)
    model._maybe_symbolic_build(data_batch=next(iter(data)))
    step = tf.function(lambda batch: model.train_step(batch), autograph=False)
    graph = step.get_concrete_function(next(iter(data))).graph
    return [op for op in graph.get_operations() if op.type == "NcclAllReduce"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_are_summed_by_nccl(dtype):
    found = traced_with(cross_device.NcclAllReduce(), dtype)
    by_device = {op.device[-5:]: op.get_attr("T") for op in found}
    assert by_device == {"CPU:0": tf.float32, "CPU:1": tf.float32}


def test_tensorflows_nccl_has_no_bfloat16():
    with pytest.raises(TypeError, match="bfloat16 not in list of allowed values"):
        traced_with(tf.distribute.NcclAllReduce(), "bfloat16")


def test_what_auto_measures_has_devices():
    """A term without one is what NCCL refuses: `read_value` outside a device's scope."""
    devices = ["CPU:0", "CPU:1"]
    terms = choice._inputs(devices, [(3, tf.float32)])
    graph = (
        tf.function(
            lambda: cross_device.all_reduce(
                cross_device.NcclAllReduce(),
                [[choice._read(device, v) for device, v in zip(devices, terms[0], strict=True)]],
            ),
            autograph=False,
        )
        .get_concrete_function()
        .graph
    )
    assert sum(op.type == "NcclAllReduce" for op in graph.get_operations()) == 2
    with pytest.raises(ValueError, match="Device assignment for .* required for nccl"):
        tf.function(
            lambda: cross_device.all_reduce(
                cross_device.NcclAllReduce(), [[v.read_value() for v in terms[0]]]
            ),
            autograph=False,
        ).get_concrete_function()


def test_who_shares_a_gpu_is_joined_by_the_ring():
    one, other = {"device": "GPU:0", "gpu": "aa"}, {"device": "GPU:0", "gpu": "bb"}
    assert refusal_between([one, other]) == ""
    assert refusal_between([one, other, one]) == "workers 0 and 2 share a GPU"
    half = {"device": "GPU:0", "reason": "a half"}
    assert refusal_between([one, half]) == "worker 1: a half"
    assert refusal(["CPU:0"]) == "NCCL joins GPUs, and CPU:0 is none"
