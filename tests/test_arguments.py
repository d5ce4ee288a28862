"""What public functions say of input that cannot be: what is required, what came, what to do.

Story: each of these ended in an `AttributeError`, a `ZeroDivisionError` or Keras's words, or
passed, to fail later or never.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel import callbacks, data

X, Y = np.zeros((8, 4)), np.zeros((8, 2))
TWO = ["CPU:0", "CPU:1"]


def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])


def batches(xy=(X, Y), **options):
    return data.EpochBatches(xy, **{"global_batch_size": 4, **options})


def parse(record):
    return record, record


CASES = {
    "by_sample": (lambda: data.by_sample([1, 2]), r"Received: \[1, 2\] .*. Create one"),
    "by_feature": (lambda: data.by_feature([1], 2), r"Make it an array: `np.asarray\(data\)`"),
    "by_feature: parts": (lambda: data.by_feature(X, [2]), r"Received: num_parts=\[2\]"),
    "rows_by_replica": (lambda: data.rows_by_replica(0, 2), "Received: strategy=0. Pass `model"),
    "rows_by_replica: rows": (
        lambda: data.rows_by_replica(tfparallel.MirroredStrategy(TWO), -1),
        "Received: num_rows=-1",
    ),
    "batch of 0": (lambda: batches(global_batch_size=0), "Received: global_batch_size=0. Pass"),
    "batch of -4": (lambda: batches(global_batch_size=-4), "Received: global_batch_size=-4"),
    "batch as text": (lambda: batches(global_batch_size="64"), "Received: global_batch_size='64'"),
    "seed": (lambda: batches(seed="a"), "`seed` must be a whole number .* Received: seed='a'"),
    "steps": (lambda: batches(steps_per_epoch=0), "Received: steps_per_epoch=0"),
    "path": (lambda: batches("file.npz"), r"Received: 'file.npz' .*NPZShards\(\['file.npz'\]\)"),
    "an array": (lambda: batches(X), r"Received: ndarray of shape \(8, 4\). Put .* \(x, y\)"),
    "lengths": (lambda: batches((X, Y[1:])), r"of shapes \(8, 4\), \(7, 2\)"),
    "numbers": (lambda: batches((1, 2)), r"Received: arrays of shapes \(\), \(\)"),
    "no example": (lambda: batches((X[:0], Y[:0])), ", at least one"),
    "a data set, batch of 0": (
        lambda: batches(tf.data.Dataset.from_tensor_slices((X, Y)), global_batch_size=0),
        "Received: global_batch_size=0",
    ),
    "NPZShards": (lambda: data.NPZShards("s.npz"), r"Received: 's.npz' .* Pass \['s.npz'\], or"),
    "TFRecords": (lambda: data.TFRecords("s", parse), r"Received: 's' .* Pass \['s'\], or"),
    "TFRecords: none": (lambda: data.TFRecords(None, parse), "Received: None. Pass"),
    "parse": (lambda: data.TFRecords(["s"], None), "`parse` must be .* Received: parse=None"),
    "device_memory": (
        lambda: tfparallel.model_parallel(build, TWO, device_memory="much"),
        "Received: device_memory='much'",
    ),
    "device_memory, pipeline": (
        lambda: tfparallel.pipeline_parallel(build, TWO, device_memory=-1),
        "Received: device_memory=-1",
    ),
    "device_memory, hybrid": (
        lambda: tfparallel.hybrid_parallel(build, {"pipeline": 2}, devices=TWO, device_memory=[]),
        r"Received: device_memory=\[\]",
    ),
    "batch_size": (
        lambda: tfparallel.model_parallel(build, TWO, batch_size=0),
        "Received: batch_size=0. Pass the one that you train with",
    ),
    "check": (
        lambda: tfparallel.check(build, lambda model: model.compile("sgd", "mse"), X),
        r"Data must be \(x, y\).*Received: ndarray of shape \(8, 4\). Put",
    ),
    "compile_model": (
        lambda: tfparallel.check(build, lambda model: None, (X, Y), devices=TWO),
        "`compile_model` must compile the model .* Call `model.compile",
    ),
    "NaNGuard": (lambda: callbacks.NaNGuard("warn"), "Received: stop='warn'. Write NaNGuard"),
    "Preemption": (lambda: callbacks.Preemption("ckpt"), "Received: 'ckpt'. Write `checkpoint"),
    "Checkpoint": (lambda: callbacks.Checkpoint(None), "Received: directory=None. Write"),
    "start_timeout": (lambda: tfparallel.init(start_timeout=-1), "Received: start_timeout=-1"),
    "stall_timeout": (lambda: tfparallel.init(stall_timeout="1"), "Received: stall_timeout='1'"),
    "all_reduce": (lambda: tfparallel.init(all_reduce="foo"), "Received: all_reduce='foo'. Omit"),
    "compression": (lambda: tfparallel.init(compression="foo"), "foo"),
    "list_devices": (
        lambda: tfparallel.devices.list_devices("TPU"), "CPU or GPU, .* Received: device_type='TPU'"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), list(CASES.values()), ids=list(CASES))
def test_bad_input_is_told(call, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


def test_a_size_may_be_a_text():
    model = tfparallel.model_parallel(build, TWO, device_memory="1GiB")
    assert set(model.placement.values()) == set(TWO)


def test_a_transport_that_needs_gpus_is_no_mistake_in_a_single_process():
    tfparallel.init(all_reduce="nccl", compression="bf16")
