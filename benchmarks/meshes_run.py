"""One process of meshes.py: trains a task on each mesh of a plan, in turns.

    meshes_run.py TASK PLAN.json OUTPUT.json NUM_ROUNDS

A mesh is built with the stages of the plan. A step is the median of a round. Memory is what
TensorFlow's allocator counts on the CPU, for all its logical devices together: what remains after a
step, and what a step needs beyond that.

    meshes_run.py plan FLAGS...

is `tfparallel plan`. With BUSY=1 in the environment, both use the time that the process's threads
are busy, instead of wall time: what they would take alone on a core.
"""

import json
import os
import pathlib
import statistics
import sys
import time

if os.environ.get("BUSY"):
    time.perf_counter = time.process_time

import tfparallel
from tfparallel.callbacks.step_measures import StepTime
from tfparallel.command_line.runner import run
from tfparallel.layout.mesh import Mesh

STEPS_OF_A_ROUND = 16


def main(path, plan_path, output, num_rounds):
    plan = json.loads(pathlib.Path(plan_path).read_text())
    devices = tfparallel.devices.split_cpu(plan["num_devices"])
    import keras
    import tensorflow as tf

    from tfparallel.data.batches import first_batches
    from tfparallel.task import load_task

    task = load_task(path)
    data, _ = task.load_data()
    batch, _ = first_batches(  # The last one is short.
        data, global_batch_size=plan["batch_size"], seed=0, num_batches=2
    )
    dataset = tf.data.Dataset.from_tensors(batch).repeat(STEPS_OF_A_ROUND)
    models, rows, counts_memory = [], [], counts()
    for candidate in plan["meshes"]:
        if "step_seconds" not in candidate:
            continue
        before = counted("current")
        keras.utils.set_random_seed(0)
        model = build(task, candidate, devices)
        task.compile_model(model)
        model.fit(dataset, verbose=0)
        resident_bytes = counted("current") - before
        if counts_memory:
            tf.config.experimental.reset_memory_stats("CPU:0")
        before = counted("current")
        model.fit(dataset, verbose=0)
        models.append(model)
        peak_bytes = resident_bytes + counted("peak") - before if counts_memory else None
        rows.append({**candidate, "held": peak_bytes, "rounds": []})
    for index in range(num_rounds):
        pairs = list(zip(models, rows, strict=True))
        for model, row in pairs if index % 2 else pairs[::-1]:
            steps = StepTime()
            model.fit(dataset, verbose=0, callbacks=[steps])
            row["rounds"].append(statistics.median(steps.seconds[1:]))
    pathlib.Path(output).write_text(json.dumps(rows))


def build(task, candidate, devices):
    mesh = Mesh(**candidate["mesh"])
    used_devices = devices[: mesh.size]
    stages = {
        "num_micro_batches": candidate["num_micro_batches"],
        "layers_per_stage": candidate["layers_per_stage"],
    }
    if candidate["form"] == "none":
        return task.build_model()
    if candidate["form"] == "data":
        shard = candidate.get("shard")
        return tfparallel.data_parallel(task.build_model, devices=used_devices, shard=shard)
    if candidate["form"] == "tensor":
        return tfparallel.tensor_parallel(task.build_model, devices=used_devices)
    if candidate["form"] == "pipeline":
        return tfparallel.pipeline_parallel(task.build_model, used_devices, **stages)
    return tfparallel.hybrid_parallel(task.build_model, mesh, used_devices, **stages)


def counted(which):
    import tensorflow as tf

    if not counts():
        return 0
    return tf.config.experimental.get_memory_info("CPU:0")[which]


def counts():
    """Whether TensorFlow counts this CPU's memory, as it does with oneDNN."""
    return tfparallel.devices.peak_tensor_bytes() is not None


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        sys.exit(run("plan", sys.argv[2:]))
    main(*sys.argv[1:4], int(sys.argv[4]))
