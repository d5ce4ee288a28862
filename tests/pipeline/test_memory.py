"""What a step holds, by the count of TensorFlow's own allocator: the arithmetic of activations."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.tensor_bytes import tensor_bytes
from tfparallel.layout.schedule import make_schedule

pytestmark = pytest.mark.slow

DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
NUM_MICRO_BATCHES = 8
ROWS, WIDTH, LAYERS_OF_A_STAGE = 1024, 256, 4
# Of a micro-batch in a stage: what each layer puts out, in float32.
ACTIVATIONS = ROWS * WIDTH * LAYERS_OF_A_STAGE * 4


def tall():
    return keras.Sequential(
        [keras.Input((WIDTH,))]
        + [layers.Dense(WIDTH, activation="relu") for _ in range(len(DEVICES) * LAYERS_OF_A_STAGE)]
    )


def in_flight(schedule):
    return sum(make_schedule(schedule, len(DEVICES), NUM_MICRO_BATCHES).most_in_flight())


def test_1f1b_holds_less_than_gpipe_and_a_recompute_less_than_that():
    gpipe, one = most_held("gpipe", "never"), most_held("1f1b", "never")
    assert (in_flight("gpipe"), in_flight("1f1b")) == (32, 4 + 3 + 2 + 1)
    assert gpipe - one == pytest.approx((32 - 10) * ACTIVATIONS, rel=0.25)
    # What waits leaves what its stage was sent, a layer's share; each device computes one again.
    saved = 10 * (1 - 1 / LAYERS_OF_A_STAGE) - len(DEVICES)
    assert one - most_held("1f1b", "always") > saved / 2 * ACTIVATIONS


def most_held(schedule, recompute):
    """Bytes that a step's tensors take, beyond those between steps."""
    keras.utils.set_random_seed(1)
    model = tfparallel.pipeline_parallel(
        tall,
        DEVICES,
        NUM_MICRO_BATCHES,
        schedule,
        recompute=recompute,
        layers_per_stage=[LAYERS_OF_A_STAGE] * len(DEVICES),
    )
    model.compile("sgd", "mse")
    x = tf.ones((ROWS * NUM_MICRO_BATCHES, WIDTH))
    model.train_on_batch(x, x)
    before = tensor_bytes("current")
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.train_on_batch(x, x)
    return tensor_bytes("peak") - before
