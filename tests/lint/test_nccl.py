"""What joins GPUs, traced without one: NCCL's types, and one order on every device."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel.collectives import algorithm_selection, cross_device, packing, process_group
from tfparallel.collectives.nccl import refusal, refusal_between
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.reducer import Reducer
from tfparallel.seams import tensorflow as seam
from tfparallel.tracing.graphs import with_inner

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
    messages = []
    for op in operations:
        hint, dtype = op.get_attr("communication_hint").decode(), op.get_attr("T")
        if dtype.is_floating and (hint != "nccl" or op.device != GPU or dtype not in OF_NCCL):
            messages.append(f"{op.name} of {dtype.name} by {hint} on {op.device}")
        if not dtype.is_floating and (hint != "ring" or op.device != HOST):
            messages.append(f"{op.name} of {dtype.name} by {hint} on {op.device}")
    for device in (GPU, HOST):
        of_device = [op for op in operations if op.device == device]
        messages += [
            f"{later.name} is not behind {earlier.name}"
            for earlier, later in itertools.pairwise(of_device)
            if not is_behind(later, earlier)
        ]
    return messages


@pytest.fixture(name="group")
def a_group():
    return ProcessGroup(2, 0, GPU).with_transport("nccl")


def test_gpus_are_joined_by_nccl_in_one_order(group):
    operations = collectives_of(program_of(group))
    assert len(operations) > 10 and faults(operations) == []


def test_the_lint_sees_a_missing_hint(group, monkeypatch):
    def without_hint(*args, communication_hint, **kwargs):
        return seam.all_reduce_v2(*args, communication_hint="auto", **kwargs)

    monkeypatch.setattr(process_group, "all_reduce_v2", without_hint)
    assert any("by auto" in fault for fault in faults(collectives_of(program_of(group))))


def test_the_lint_sees_a_second_order(group):
    users = group.for_users
    with tf.device(GPU):
        users._ordering_tokens = {GPU: tf.Variable(0.0), HOST: tf.Variable(0.0)}
    assert any("is not behind" in fault for fault in faults(collectives_of(program_of(group))))


def test_the_lint_sees_a_type_that_nccl_lacks(group, monkeypatch):
    monkeypatch.setattr(process_group, "_WIDENED", ())
    operations = collectives_of(lambda: group.all_reduce([tf.ones([3], tf.bfloat16)]))
    assert any("bfloat16" in fault for fault in faults(operations))


def test_a_vector_has_no_more_elements_than_31_bits_count(monkeypatch, group):
    monkeypatch.setattr(packing, "_MAX_ELEMENTS", 10)
    operations = collectives_of(lambda: group.all_reduce([tf.ones([n]) for n in (4, 5, 3, 20, 6)]))
    assert [op.inputs[0].shape[0] for op in operations] == [9, 3, 20, 6]


def test_nor_has_one_in_a_process(monkeypatch):
    monkeypatch.setattr(packing, "_MAX_ELEMENTS", 10)
    together = []

    class Noted(tf.distribute.ReductionToOneDevice):
        def batch_reduce_implementation(self, reduce_op, pairs, options):
            together.append([value.values[0].shape[0] for value, _ in pairs])
            return super().batch_reduce_implementation(reduce_op, pairs, options)

    terms = [[tf.ones([n]), tf.ones([n])] for n in (4, 5, 3, 20, 6)]
    sums = cross_device.all_reduce(Noted(), terms)
    assert together == [[4, 5], [3], [20], [6]]
    assert all(np.all(total == 2.0) for of_all in sums for total in of_all)


def sums_of(ops, dtype="float32", regularizer=None, **options):
    """The NCCL operations of a training step, and whether the step needs each."""
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    strategy.all_reduce_ops, strategy.all_reduce_name = ops, "nccl"
    policy = {"dtype": dtype, "kernel_regularizer": regularizer, "bias_regularizer": regularizer}
    plain = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, **policy), layers.Dense(2, **policy)]
    )
    model = tfparallel.data_parallel(plain, strategy=strategy)
    optimizer = keras.optimizers.SGD(0.1, **options)
    if dtype == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensor_slices((np.ones((6, 4)), np.ones((6, 2)))).batch(6)
    batch = next(iter(data))
    model._maybe_symbolic_build(data_batch=batch)

    def step(batch):
        with model.strategy.program():
            return model.train_step(batch)

    graph = tf.function(step, autograph=False).get_concrete_function(batch).graph
    return [
        (op, any(op is end or is_behind(end, op) for end in ends_of(op.graph)))
        for op in with_inner(graph.get_operations())
        if op.type == "NcclAllReduce"
    ]


def ends_of(graph):
    return [*graph.control_outputs, *(tensor.op for tensor in graph.outputs)]


STEPS = {
    "SGD": {},
    "bfloat16": {"dtype": "bfloat16"},
    "mixed_float16": {"dtype": "mixed_float16"},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"global_clipnorm": 1.0},
    "regularized": {"regularizer": "l2"},
}


@pytest.mark.parametrize(
    "name",
    # A loss scale is where TensorFlow's own reduction leaves one out.
    [
        name if name == "mixed_float16" else pytest.param(name, marks=pytest.mark.slow)
        for name in STEPS
    ],
)
def test_replicas_are_summed_by_nccl_on_every_device(name):
    """A device that leaves its operation out has the others wait for ever."""
    sums = sums_of(cross_device.NcclAllReduce(), **STEPS[name])
    assert {op.get_attr("T") for op, _ in sums} == {tf.float32}
    runs = [op.device[-5:] for op, is_needed in sums if is_needed]
    assert sorted(runs) == sorted(op.device[-5:] for op, _ in sums)
    assert set(runs) == {"CPU:0", "CPU:1"}


@pytest.mark.slow
def test_the_lint_sees_a_sum_that_nobody_reads():
    sums = sums_of(tf.distribute.NcclAllReduce(), **STEPS["mixed_float16"])
    assert [op.device[-5:] for op, is_needed in sums if not is_needed] == ["CPU:1"]


def test_tensorflows_nccl_has_no_bfloat16():
    with pytest.raises(TypeError, match="bfloat16 not in list of allowed values"):
        sums_of(tf.distribute.NcclAllReduce(), "bfloat16")


def test_sums_of_several_types_in_a_custom_loop():
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"], all_reduce="ring")

    def replica():
        values = [tf.ones([2]), tf.constant([1, 2]), tf.ones([3], tf.float64), tf.constant(3)]
        return tf.distribute.get_replica_context().all_reduce("SUM", values)

    floats, ints, doubles, one = strategy.run(tf.function(replica))
    sums = [strategy.experimental_local_results(each)[1] for each in (floats, ints, doubles, one)]
    assert [each.numpy().tolist() for each in sums] == [[2.0, 2.0], [2, 4], [2.0] * 3, 6]


def test_what_auto_measures_has_devices():
    """A term without one is what NCCL refuses: `read_value` outside a device's scope."""
    devices = ["CPU:0", "CPU:1"]
    terms = algorithm_selection.variables_on_each(devices, [(3, tf.float32)])
    graph = (
        tf.function(
            lambda: cross_device.all_reduce(
                cross_device.NcclAllReduce(),
                [
                    [
                        algorithm_selection._read(device, v)
                        for device, v in zip(devices, terms[0], strict=True)
                    ]
                ],
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
    assert refusal(["CPU:0"]) == "nccl needs GPUs; CPU:0 is not one"
