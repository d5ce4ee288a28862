"""TensorFlow's contenders of `pipeline.py` and `sharded.py`, on a transformer.

Plain Keras, one of the two processes of a pipeline, or one of two workers, by `SHARDS`. Process 1
of a pipeline serves process 0, and does not answer.
"""

import dialog
import numpy as np
from contender import compile_model, fit, make_clock

SEED = 7
NUM_BYTES, SEQUENCE_LENGTH, NUM_SEQUENCES = 256, 64, 64
WIDTH, NUM_HEADS, NUM_BLOCKS = 384, 6, 6
NUM_BATCHES = 8
NUM_TIMELINES = 5
# Of the workers of `data_parallel`: what each holds a share of.
SHARDS = {"replicated": None, "optimizer": "optimizer", "parameters": "parameters"}
BLOCK = ("norm1", "attention", "add1", "norm2", "wide", "narrow", "add2")


def build_transformer():
    """Returns a GPT on bytes of 10.8 M parameters; `torch_pipeline_contender.py` has the same.

    The attention is written with `Dense`, as PyTorch's is with `Linear`. In Keras's
    `MultiHeadAttention` the gradient of a projection's weights is one matrix a sequence, and their
    sum: a step takes 1.14 times as long (docs/internals/pipeline.md).
    """
    import keras
    from keras import layers, ops

    class Attention(layers.Layer):
        """Causal self-attention."""

        def build(self, shape):
            self.projections = [layers.Dense(WIDTH) for _ in range(4)]
            for projection in self.projections:
                projection.build(shape)
            self.seen = np.tril(np.ones((SEQUENCE_LENGTH, SEQUENCE_LENGTH), bool))

        def call(self, x):
            *projections, out = self.projections
            shape = (-1, SEQUENCE_LENGTH, NUM_HEADS, WIDTH // NUM_HEADS)
            query, key, value = (
                ops.transpose(ops.reshape(projection(x), shape), (0, 2, 1, 3))
                for projection in projections
            )
            query = query * (WIDTH // NUM_HEADS) ** -0.5
            scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
            shares = ops.softmax(ops.where(self.seen, scores, -1e9))
            heads = ops.transpose(ops.matmul(shares, value), (0, 2, 1, 3))
            return out(ops.reshape(heads, (-1, SEQUENCE_LENGTH, WIDTH)))

    inputs = keras.Input((SEQUENCE_LENGTH,), dtype="int32")
    x = layers.Embedding(NUM_BYTES, WIDTH, name="embedding")(inputs)
    for index in range(NUM_BLOCKS):
        norm1, attention, add1, norm2, wide, narrow, add2 = (f"{index}_{part}" for part in BLOCK)
        y = layers.LayerNormalization(name=norm1)(x)
        x = layers.Add(name=add1)([x, Attention(name=attention)(y)])
        y = layers.LayerNormalization(name=norm2)(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=wide)(y)
        x = layers.Add(name=add2)([x, layers.Dense(WIDTH, name=narrow)(y)])
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(NUM_BYTES, name="logits")(x), name="transformer")


def layers_per_stage():
    """Half of the blocks each, the same cut as in PyTorch's stages."""
    half = NUM_BLOCKS // 2 * len(BLOCK)
    return [1 + half, half + 2]


def stage_times(model, batch):
    """The stages' seconds at this micro-batch size, and the predicted time of their schedule."""
    from tfparallel.layout.simulator import simulate
    from tfparallel.pipeline.measure import measured_timelines, median_timeline, stage_seconds

    timelines = measured_timelines(model, batch, NUM_TIMELINES)
    stages = stage_seconds(timelines)
    number = model.schedule.num_micro_batches
    return {
        "serial_seconds": number * sum(stage.forward + stage.backward for stage in stages),
        "passes_seconds": median_timeline(timelines).makespan,
        "simulated_seconds": simulate(model.schedule, stages).makespan,
        "bubble": median_timeline(timelines).bubble,
    }


def main():
    order, reply = dialog.begin()
    num_micro_batches = int(order["workload"])
    devices = None
    if order["kind"] == "ours" or order["kind"] in SHARDS:
        import tfparallel

        if order["kind"] == "ours":
            devices = tfparallel.connect_to_cluster()
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(SEED)
    if order["kind"] in SHARDS:
        model = tfparallel.data_parallel(build_transformer, shard=SHARDS[order["kind"]])
    elif devices is None:
        model = build_transformer()
    else:
        model = tfparallel.pipeline_parallel(
            build_transformer,
            devices,
            num_micro_batches,
            schedule="1f1b",
            layers_per_stage=layers_per_stage(),
        )
    compile_model(model)
    generator = np.random.default_rng(SEED)
    size = (NUM_BATCHES, NUM_SEQUENCES, SEQUENCE_LENGTH)
    x, y = (generator.integers(NUM_BYTES, size=size).astype("int32") for _ in range(2))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(2)
    reply(num_parameters=model.count_params(), tensorflow=tf.__version__, keras=keras.__version__)
    clock = make_clock()
    for request in dialog.requests():
        if request["steps"] == 0:
            reply(**stage_times(model, (x[0], y[0])))
        else:
            reply(**fit(model, dataset, clock, **request), peak_mib=dialog.peak_mib())


if __name__ == "__main__":
    main()
