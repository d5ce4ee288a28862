"""What rests on insides of TensorFlow and Keras stands where docs/upstream.md says."""

import ast
import pathlib
import socket
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.cluster.loopback import loopback_only
from tfparallel.cluster.ports import free_ports
from tfparallel.seams.functional import LEAVES_TRAINING
from tfparallel.seams.keras import is_in_call
from tfparallel.seams.tensorflow import ResourceVariable

TOP = pathlib.Path(__file__).parents[1]
PACKAGE = TOP / "tfparallel"
PRIVATE = ("tensorflow.python", "keras.src")
SEAMS = "tfparallel.seams"


def imports_of(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields each import of a file: its module, and the name that is taken, if any."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def files() -> Iterator[tuple[str, pathlib.Path]]:
    """Yields the package's files, each with its path in it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), path


def test_private_modules_are_imported_by_the_seams_alone():
    importers = {
        name
        for name, path in files()
        for module, _ in imports_of(path)
        if module.startswith(PRIVATE)
    }
    assert importers and all(name.startswith("seams/") for name in importers)


def test_whoever_takes_a_private_name_is_in_the_page():
    page = (TOP / "docs" / "upstream.md").read_text(encoding="utf-8")
    takers = {
        name
        for name, path in files()
        for module, _ in imports_of(path)
        if module.startswith(SEAMS) and not name.startswith("seams/")
    }
    assert takers
    assert not [name for name in takers if f"`{name}`" not in page]


def test_what_the_seams_offer_is_taken():
    taken = {name for _, path in files() for module, name in imports_of(path) if SEAMS in module}
    for module in ("tensorflow", "keras"):
        tree = ast.parse((PACKAGE / "seams" / f"{module}.py").read_text(encoding="utf-8"))
        (offered,) = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
        ]
        assert set(offered) <= taken


def test_a_variable_of_a_strategys_scope_has_copies():
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        assert hasattr(tf.Variable(0.0), "values")
        assert not hasattr(ResourceVariable(0.0), "values")


def test_a_backward_pass_is_no_call():
    class Probe(keras.layers.Layer):
        def call(self, x):
            @tf.custom_gradient
            def same(x):
                seen.append(is_in_call())
                return x * 1, lambda upstream: seen.append(is_in_call()) or upstream

            return same(x)

    seen = []
    with tf.GradientTape() as tape:
        x = tf.Variable(1.0)
        y = Probe()(x)
    tape.gradient(y, x)
    assert seen == [True, False] and not is_in_call()


def test_what_a_call_without_training_is_called_with():
    class Probe(keras.layers.Layer):
        def call(self, x, training=None):
            seen.append(training)
            return x

    seen = []
    inputs = keras.Input((1,))
    model = keras.Model(inputs, Probe()(Probe()(inputs, training=False)))
    seen.clear()
    model(np.zeros((1, 1)), training=True)
    assert seen == [not LEAVES_TRAINING] * 2


def cuts_off_devices():
    """Whether a socket may be bound to a device: on Linux 5.7, or as root."""
    try:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
    except (OSError, AttributeError):
        return False
    return True


@pytest.mark.skipif(not cuts_off_devices(), reason="only root may bind a socket to a device here")
def test_tensorflows_server_is_bound_to_the_loopback():
    """It shares its port with the sockets that guard it, if its variable says so."""
    (port,) = free_ports(1)
    cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}"]})
    with loopback_only(port) as problems:
        server = tf.distribute.Server(cluster, job_name="worker", task_index=0, start=False)
    assert problems == []
    with socket.create_connection(("127.0.0.1", port), 5):
        del server
