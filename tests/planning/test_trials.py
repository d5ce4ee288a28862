"""Trials of meshes, in this process: what is trained, on how much, and what cannot be."""

import types

import keras
import numpy as np
import pytest

from tfparallel.command_line.options import TrainOptions
from tfparallel.command_line.runner import checked
from tfparallel.commands.task_setup import trial_builder
from tfparallel.layout.mesh import Mesh
from tfparallel.planning.candidates import Candidate, Choices
from tfparallel.planning.planner import Plan
from tfparallel.planning.prediction import Prediction
from tfparallel.planning.trials import after_trials, batch_of
from tfparallel.task import TaskError
from tfparallel.variables.sharded import ShardedVariable

DEVICES = [f"CPU:{i}" for i in range(4)]
PREDICTION = Prediction(0.0, 1.0, 0.0, 0.0, (1,))


def build_model():
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(4, name="down")]
    )


def task(build=build_model, **compiled):
    x = np.linspace(-1, 1, 160 * 8, dtype="float32").reshape(160, 8)
    return types.SimpleNamespace(
        build_model=build,
        compile_model=lambda model: model.compile("sgd", "mse", **compiled),
        load_data=lambda: ((x, x[:, :4]), None),
    )


def tried(a_task, meshes, *flags, num_trials=4, shard=None, seen=lambda model: None):
    arguments = [__file__, "--parallel=auto", f"--num_trials={num_trials}", *flags]
    options = TrainOptions.of(checked("train", arguments)[0])
    candidates = [
        Candidate(
            mesh,
            num_micro_batches=2 if mesh.pipeline > 1 else 1,
            layers_per_stage=(1, 1) if mesh.pipeline > 1 else (2,),
            prediction=PREDICTION,
            shard=shard,
        )
        for mesh in meshes
    ]
    plan = Plan(candidates, Choices(16), 4, 1.0, 2, [16], True, 0.0)
    batch = batch_of(a_task, 16)
    build = trial_builder(a_task, DEVICES, options)

    def built(candidate):
        model = build(candidate)
        seen(model)
        return model

    plan_after = after_trials(plan, batch, built, options.num_trials)
    return {candidate.mesh: candidate for candidate in plan_after.ranked}


@pytest.mark.slow
def test_as_many_as_asked_for_are_trained_on_whole_batches():
    assert [len(part) for part in batch_of(task(), 16)] == [16, 16]
    meshes = [Mesh(), Mesh(data=2), Mesh(data=2, pipeline=2), Mesh(tensor=2)]
    by_mesh = tried(task(), meshes, num_trials=3)
    assert [c.measured_seconds is not None for c in by_mesh.values()] == [True, True, True, False]
    assert [c.mesh for c in by_mesh.values()][-1] == Mesh(tensor=2)
    seconds = [c.measured_seconds for c in by_mesh.values()][:3]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_executions_of_several_steps_are_counted_by_the_step():
    (one,) = tried(task(steps_per_execution=4), [Mesh()]).values()
    assert one.measured_seconds > 0


@pytest.mark.slow
def test_each_mesh_is_tried_in_the_same_precision():
    seen = []

    def build():
        seen.append(keras.config.dtype_policy().name)
        return build_model()

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        tried(task(build), [Mesh(), Mesh(data=2)])
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")
    assert set(seen) == {"mixed_bfloat16"}


@pytest.mark.slow
def test_flags_of_stages_are_for_meshes_with_stages():
    by_mesh = tried(
        task(), [Mesh(data=2, tensor=2)], "--schedule=interleaved", "--recompute=always"
    )
    assert by_mesh[Mesh(data=2, tensor=2)].why_not is None


@pytest.mark.slow
def test_what_cannot_be_trained_is_listed_behind_the_others():
    """A layer whose loss is of the mean of a batch: no form that divides it can keep that."""

    class Spread(keras.layers.Layer):
        def call(self, x):
            self.add_loss(-keras.ops.mean((x - keras.ops.mean(x, 0, keepdims=True)) ** 2))
            return x

    def build():
        parts = [keras.layers.Dense(8), Spread(), keras.layers.Dense(4)]
        return keras.Sequential([keras.Input((8,)), *parts])

    by_mesh = tried(task(build), [Mesh(data=2), Mesh()], num_trials=1)
    assert [str(mesh) for mesh in by_mesh] == ["one device", "data=2"]
    refused = by_mesh[Mesh(data=2)]
    assert refused.prediction is None and "A layer mixes examples" in refused.why_not


def test_if_nothing_can_be_trained_the_error_says_why():
    def build():
        raise ValueError("There is no such file. Received: 'x'.")

    with pytest.raises(TaskError, match=r"No mesh could be trained\. Received: one device: There"):
        tried(task(build), [Mesh(), Mesh(data=2)])


def test_what_replicas_share_out_is_shared_out_in_the_trial():
    shared = []

    def seen(model):
        shared.append([isinstance(v, ShardedVariable) for v in model.trainable_variables])

    def build():
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(512), keras.layers.Dense(4)])

    (candidate,) = tried(task(build), [Mesh(data=2)], shard="parameters", seen=seen).values()
    assert candidate.name == "data=2, shard=parameters" and candidate.measured_seconds > 0
    assert shared == [[True, False, False, False]]
