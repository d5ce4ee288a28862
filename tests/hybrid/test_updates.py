"""Updates of several batches, and in shares, on meshes: the weights of one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.commands.command_line import ROOT
from tests.comparison import seeded
from tests.forked import run_python
from tests.replication import test_sharded_optimizer as sharded
from tests.replication.sync import test_accumulated_steps as accumulated
from tfparallel import Mesh
from tfparallel.strategies.variables import copies as copies_of
from tfparallel.update.built_optimizers import wrapped_by

pytestmark = pytest.mark.slow

DEVICES = [f"CPU:{index}" for index in range(8)]
STEPS = accumulated.STEPS


def on_mesh(function, mesh, **options):
    number = 1 if mesh.data == 4 else 2
    options = {"num_micro_batches": number} | options
    devices = DEVICES[: mesh.size]
    return tfparallel.hybrid_parallel(lambda: seeded(function), mesh, devices, **options)


def in_stages(function, schedule):
    return tfparallel.pipeline_parallel(
        lambda: seeded(function), DEVICES[:2], 2, schedule, sync=f"accumulate:{STEPS}"
    )


def of_one_step(case):
    one = seeded(accumulated.CASES[case][0])
    accumulated.trained(one, case, accumulated.ROWS * STEPS)
    return one


@pytest.mark.parametrize(
    ("case", "schedule"),
    [(case, "1f1b") for case in accumulated.CASES] + [("sum", "gpipe"), ("mask", "gpipe")],
)
def test_batches_in_stages_are_one_larger_batch(in_float64, case, schedule):
    model = in_stages(accumulated.CASES[case][0], schedule)
    accumulated.trained(model, case, accumulated.ROWS)
    assert accumulated.apart(model, of_one_step(case)) < 1e-9


@pytest.mark.parametrize(
    "mesh",
    [Mesh(data=2, pipeline=2), Mesh(data=2, tensor=2), Mesh(pipeline=2, tensor=2)],
    ids=str,
)
@pytest.mark.parametrize("case", ["Adam, clipped", "mask"])
def test_batches_on_a_mesh_are_one_larger_batch(in_float64, mesh, case):
    model = on_mesh(accumulated.CASES[case][0], mesh, sync=f"accumulate:{STEPS}")
    accumulated.trained(model, case, accumulated.ROWS)
    assert accumulated.apart(model, of_one_step(case)) < 1e-9


def test_predictions_that_meet_are_no_sums_over_rows():
    model = in_stages(accumulated.build, "gpipe")
    model.compile("sgd", "hinge")
    with pytest.raises(ValueError, match="Received: loss 'hinge' might mix examples"):
        model.fit(*accumulated.data(), verbose=0)


@pytest.mark.parametrize("sync", ["accumulate:auto", "local_sgd:8", "async"])
def test_other_policies_are_of_whole_replicas(sync):
    with pytest.raises(ValueError, match="every_step' or 'accumulate:N'. Received: "):
        tfparallel.pipeline_parallel(accumulated.build, DEVICES[:2], sync=sync)


@pytest.mark.parametrize("form", ["stages", "replicas"])
def test_an_update_of_rows_without_weight_is_of_the_regularizers(in_float64, form):
    """All rows of the first update have a sample weight of zero."""
    build = functools.partial(accumulated.build, "l2")
    x, y = (array[:24] for array in accumulated.data())
    weights = np.repeat([0.0, 1.0], 12)
    one, model = seeded(build), (
        in_stages(build, "1f1b")
        if form == "stages"
        else tfparallel.data_parallel(
            lambda: seeded(build), devices=DEVICES[:2], sync=f"accumulate:{STEPS}"
        )
    )
    for each, rows in ((one, 4 * STEPS), (model, 4)):
        each.compile(keras.optimizers.SGD(0.1), accumulated.mean_by_weights())
        each.fit(x, y, batch_size=rows, sample_weight=weights, shuffle=False, verbose=0)
    assert difference(model.get_weights(), one.get_weights()) < 1e-9


def test_gradients_of_another_loss_are_dropped(in_float64):
    one, model = seeded(accumulated.build), in_stages(accumulated.build, "1f1b")
    x, y = (array[:4] for array in accumulated.data())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.train_on_batch(x, y)
    for each, times in ((one, 1), (model, STEPS)):
        each.compile(keras.optimizers.SGD(0.1), "mae")
        for _ in range(times):
            each.train_on_batch(x, y)
    assert difference(model.get_weights(), one.get_weights()) < 1e-9


def trained(model, optimizer, function):
    model.compile(optimizer(), "mse", metrics=["mae"])
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)  # Within a step, Keras does it anew.
    x, y = sharded.data(function)
    return model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)


def difference(actual, expected):
    pairs = zip(actual, expected, strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def with_constraint():
    return sharded.build("non_neg")


SHARED = ("Adam", "ScheduleFreeAdamW", "global_clipnorm", "clipnorm", "moving average")
SHARED += ("loss scaling", "several")
CASES = {name: (sharded.build, sharded.OPTIMIZERS[name]) for name in SHARED} | {
    "embedding": (sharded.build_embedding, sharded.OPTIMIZERS["Adam"]),
    "constraint": (with_constraint, sharded.OPTIMIZERS["AdamW"]),
}
CASES |= {
    f"{name}, of several steps": (sharded.build, sharded.ACCUMULATING[name])
    for name in ("Adam", "clipnorm", "global_clipnorm")
}


@pytest.mark.parametrize("mesh", [Mesh(data=2, pipeline=2), Mesh(data=2, tensor=2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_each_replica_may_keep_its_share_of_the_optimizer(in_float64, tmp_path, case, mesh):
    """In the file whole slots, which one device goes on with."""
    function, optimizer = CASES[case]
    one = seeded(function)
    model = on_mesh(function, mesh, shard="optimizer")
    trained(one, optimizer, function)
    trained(model, optimizer, function)
    assert difference(model.get_weights(), one.get_weights()) < 1e-9
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert difference(loaded.optimizer.variables, one.optimizer.variables) < 1e-9
    optimizers = [model.optimizer, *wrapped_by(model.optimizer)]
    shares = [v for each in optimizers for v in each._variables if hasattr(v, "_sharded")]
    num_elements = sum(int(np.prod(copies_of(share)[0].shape)) for share in shares)
    whole = sum(int(np.prod(share._sharded.shape)) for share in shares)
    assert whole / 2 <= num_elements < 0.6 * whole
    assert all(len(copies_of(share)) == 2 for share in shares)


@pytest.mark.parametrize("mesh", [Mesh(data=2, pipeline=2), Mesh(data=2, tensor=2)], ids=str)
def test_a_built_model_brings_its_slots_into_shares(in_float64, mesh):
    one = seeded(sharded.build)
    trained(one, sharded.OPTIMIZERS["Adam"], sharded.build)
    model = tfparallel.hybrid_parallel(
        one, mesh, DEVICES[:4], num_micro_batches=2, shard="optimizer"
    )
    states: list[dict] = [{}, {}]
    for each, slots in zip((one, model), states, strict=True):
        each.optimizer.save_own_variables(slots)
    assert difference(*(list(map(np.asarray, slots.values())) for slots in states)) == 0


@pytest.mark.parametrize("form", ["mesh", "replicas"])
def test_shares_are_neither_swapped_nor_written_as_wholes(tmp_path, form):
    if form == "mesh":
        model = on_mesh(sharded.build, Mesh(data=2, pipeline=2), shard="optimizer")
    else:
        model = sharded.on_replicas(2)
    trained(model, lambda: keras.optimizers.Adam(0.05, use_ema=True), sharded.build)
    with pytest.raises(ValueError, match="Received: SwapEMAWeights with `shard`"):
        model.fit(*sharded.data(), callbacks=[keras.callbacks.SwapEMAWeights()], verbose=0)
    with pytest.raises(ValueError, match="would save only one replica's shard"):
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "all"))


def eight_devices():
    """The largest difference on meshes of eight devices."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    differences, case = [], "Adam, clipped"
    for mesh in (Mesh(data=2, pipeline=2, tensor=2), Mesh(data=4, pipeline=2)):
        options = {"sync": f"accumulate:{STEPS}", "shard": "optimizer"}
        model = on_mesh(accumulated.CASES[case][0], mesh, num_micro_batches=1, **options)
        accumulated.trained(model, case, accumulated.ROWS)
        one = of_one_step(case)
        differences.append(difference(model.get_weights(), one.get_weights()))
    return max(differences)


ON_EIGHT = """
import tfparallel
tfparallel.devices.split_cpu(8)
from tests.hybrid.test_updates import eight_devices
print(eight_devices())
"""


def test_on_eight_devices():
    """Of batches and of shares at once."""
    done = run_python(["-c", ON_EIGHT], cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-9
