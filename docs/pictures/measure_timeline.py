"""Measures a step of a pipeline of two processes, a core each, and writes `timeline.json`.

    tfparallel launch --nproc_per_node=2 -- python docs/pictures/measure_timeline.py

The model is that of `benchmarks/pipeline.py`: 10.8 M parameters, 64 sequences of 64, 1F1B.
"""

import json
import os
import pathlib
import re
import sys

TOP = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(TOP / "benchmarks")]
NUM_MICRO_BATCHES, NUM_STEPS = 8, 15


def main():
    """Writes the fastest of the steps: the one that other programs disturbed least."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
    import contest

    described = contest.describe()
    del described["System"]
    import tfparallel

    devices = tfparallel.connect_to_cluster()  # Returns in process 0 alone.
    import keras
    import numpy as np
    import tensorflow as tf
    import workloads

    from tfparallel.pipeline.measure import measured_timelines

    keras.utils.set_random_seed(workloads.SEED)
    model = tfparallel.pipeline_parallel(
        workloads.build_transformer,
        devices,
        NUM_MICRO_BATCHES,
        schedule="1f1b",
        layers_per_stage=workloads.layers_per_stage(),
    )
    model.compile(
        optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    size = (workloads.NUM_SEQUENCES, workloads.SEQUENCE_LENGTH)
    generator = np.random.default_rng(workloads.SEED)
    x, y = (generator.integers(workloads.NUM_BYTES, size=size) for _ in range(2))
    timelines = measured_timelines(model, (x.astype("int32"), y), NUM_STEPS)
    fastest = min(timelines, key=lambda timeline: timeline.makespan)
    content = {
        "parameters": model.count_params(),
        "num_steps": NUM_STEPS,
        "bubble": fastest.bubble,
        "environment": described | {"TensorFlow": tf.__version__, "Keras": keras.__version__},
        "instructions": [
            [one.kind, one.stage, one.micro_batch, round(begin, 6), round(end, 6)]
            for one, (begin, end) in fastest.seconds.items()
        ],
    }
    # A line an instruction.
    text = re.sub(r"\n   +|\n  (?=\])", "", json.dumps(content, indent=1))
    pathlib.Path(__file__).with_name("timeline.json").write_text(text + "\n")
    print(f"{fastest.makespan:.3f} s, bubble {fastest.bubble:.1%}")


if __name__ == "__main__":
    main()
