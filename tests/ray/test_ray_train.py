"""Functions of Ray Train and Ray Tune that use tfparallel."""

import importlib.util

import numpy as np
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'tfparallel[ray]'")

import keras
import ray

from tests.ray import trainer_function, training
from tests.ray.clusters import cluster

pytestmark = pytest.mark.slow
ROUNDING = 1e-9  # The sums of a batch are added in another order on several workers.
NEEDS_TRAIN = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pandas", "pyarrow", "tensorboardX")),
    reason="Ray Train is not installed: pip install 'ray[train,tune]'",
)


@pytest.fixture(scope="module")
def nodes():
    with cluster(2, num_cpus=4) as started:
        yield started


@NEEDS_TRAIN
def test_data_parallel_in_a_tensorflow_trainer(nodes, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    TensorflowTrainer(
        trainer_function.with_data_parallel,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "storage")),
    ).fit()
    with np.load(tmp_path / "weights.npz") as file:
        weights = [file[name] for name in file.files]
    for weight, expected in zip(weights, training.alone(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=ROUNDING)


@NEEDS_TRAIN
def test_the_script_of_ray_47464(nodes, tmp_path):
    from ray.train import DataConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    trainer = TensorflowTrainer(
        train_loop_per_worker=trainer_function.of_the_issue,
        scaling_config=ScalingConfig(num_workers=3, use_gpu=False),
        datasets={"train": ray.data.from_items([{"x": x, "y": x + 1} for x in range(32)])},
        dataset_config=DataConfig(datasets_to_split=[]),
        train_loop_config={"num_epochs": 2},
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    result = trainer.fit()
    keras.utils.set_random_seed(7)
    model = trainer_function.build_model()
    model.compile(optimizer="Adam", loss="mean_squared_error", metrics=["mse"])
    x = np.arange(32)[:, None]
    model.fit(x, x + 1, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for weight, expected in zip(result.metrics["weights"], model.get_weights(), strict=True):
        np.testing.assert_allclose(np.array(weight), expected, rtol=1e-5)


@NEEDS_TRAIN
def test_two_trials_of_tune_at_once(nodes, tmp_path):
    from ray import tune

    results = tune.Tuner(
        tune.with_resources(trainer_function.trial, {"CPU": 1}),
        param_space={"folder": str(tmp_path), "seed": tune.grid_search([0, 1])},
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "storage"), verbose=0),
    ).fit()
    assert not results.errors
    expected = float(sum(np.abs(weight).sum() for weight in training.alone()))
    sums = [result.metrics["sum"] for result in results]
    assert sums == pytest.approx([expected] * 2, rel=ROUNDING)
