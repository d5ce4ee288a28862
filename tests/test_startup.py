"""The start: nothing loaded too early, nothing printed, one warning for another version."""

import gc
import os
import pathlib
import subprocess
import sys

import pytest

import tfparallel
from tfparallel import startup

TOP = pathlib.Path(__file__).parents[1]
DEADLINE_SECONDS = 120


def run_python(program, path=(), **environment):
    """Runs a program in a fresh process, since a start happens once in each."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TF_CPP_MIN_LOG_LEVEL", "TFPARALLEL_VERBOSE", "KERAS_BACKEND")
    }
    search = os.pathsep.join([*map(str, path), str(TOP)])
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**inherited, "PYTHONPATH": search, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


def test_importing_the_package_loads_no_tensorflow():
    finished = run_python(
        "import sys, tfparallel; dir(tfparallel); tfparallel.__version__\n"
        "print([name for name in ('tensorflow', 'keras', 'numpy') if name in sys.modules])"
    )
    assert finished.stdout == "[]\n", finished.stderr


def test_a_plain_name_of_the_face_loads_no_tensorflow():
    finished = run_python(
        "import sys\n"
        "from tfparallel import Cluster\n"
        "cluster = Cluster.from_env({'TF_CONFIG': '{}'})\n"
        "print(cluster.num_workers, cluster.to_tf_config())\n"
        "print([name for name in ('tensorflow', 'keras', 'numpy') if name in sys.modules])"
    )
    assert finished.stdout == "1 {}\n[]\n", finished.stderr


@pytest.mark.slow
def test_every_command_runs_on_what_pip_installs_alone():
    finished = run_python(
        "import importlib, pathlib, sys\n"
        "for name in ('matplotlib', 'mpi4py', 'sklearn', 'pytest', 'psutil', 'PIL'):\n"
        "    sys.modules[name] = None\n"  # As if it were not there.
        "import tfparallel\n"
        "for name in tfparallel.__all__: getattr(tfparallel, name)\n"
        "for path in pathlib.Path(tfparallel.__file__).parent.glob('commands/*.py'):\n"
        "    if path.stem != 'spawned':\n"
        "        importlib.import_module(f'tfparallel.commands.{path.stem}')\n"
    )
    assert finished.returncode == 0, finished.stderr


def test_the_face_lists_what_it_offers():
    finished = run_python(
        "import tfparallel, tfparallel.data\n"
        "assert set(tfparallel.__all__) == set(tfparallel._FACE) | {'__version__'}\n"
        "assert set(tfparallel.__all__) == set(dir(tfparallel))\n"
        "assert set(tfparallel.data.__all__) == set(dir(tfparallel.data))\n"
        "tfparallel.Strategy"
    )
    said = "no attribute 'Strategy'. It offers: Cluster, Mesh, MirroredStrategy, "
    assert said in finished.stderr


@pytest.mark.parametrize("name", ["dataparallel", "DataParallel", "data_paralel"])
def test_a_misspelt_name_is_told_the_right_one(name):
    with pytest.raises(AttributeError, match=r"Did you mean `tfparallel.data_parallel`\?$"):
        getattr(tfparallel, name)


@pytest.mark.slow
def test_start_prints_nothing_and_an_operation_neither():
    finished = run_python(
        "import tfparallel; tfparallel.devices.split_cpu(2)\n"
        "import tensorflow as tf; print(int(tf.constant(1) + 1))"
    )
    assert finished.stdout == "2\n"
    assert finished.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "wish", [{"TFPARALLEL_VERBOSE": "1"}, {"TF_CPP_MIN_LOG_LEVEL": "0"}], ids=lambda w: [*w][0]
)
def test_chatter_comes_when_asked_for(wish):
    finished = run_python("import tfparallel; tfparallel.devices", **wish)
    assert "All log messages before absl::InitializeLog()" in finished.stderr


@pytest.mark.slow
def test_the_users_log_level_is_kept():
    finished = run_python(
        "import os, tfparallel; tfparallel.devices; print(os.environ['TF_CPP_MIN_LOG_LEVEL'])",
        TF_CPP_MIN_LOG_LEVEL="1",
    )
    assert (finished.stdout, finished.stderr) == ("1\n", "")


@pytest.mark.slow
def test_a_notebook_shows_no_information_of_tensorflows():
    # TensorFlow takes a notebook and Python's prompt, where sys.ps1 exists, for people who want it.
    program = (
        "import sys; sys.ps1 = '>>> '\n"
        "{}import tfparallel; tfparallel.devices.list_devices()\n"
        "import tensorflow as tf; print(tf.get_logger().level)"
    )
    finished = run_python(program.format(""))
    assert finished.stdout == "30\n", finished.stderr
    finished = run_python(program.format("import tensorflow; "))  # The user's own start: untouched.
    assert finished.stdout == "20\n", finished.stderr


def test_only_chatter_is_held_back():
    finished = run_python(
        "import os\n"
        "from tfparallel import startup\n"
        "with startup.quiet_stderr():\n"
        "    os.write(2, b'I0000 00:00:1.5 7 port.cc:153] oneDNN is on\\n')\n"
        "    os.write(2, b'2025-01-01 00:00:00.1: I tensorflow/core/x.cc:1] hello\\n')\n"
        "    os.write(2, b'2025-01-01 00:00:00.1: E x.cc:4] Unable to register cuFFT factory'\n"
        "                b': one is there\\n')\n"
        "    os.write(2, b'E0000 00:00:1.5 7 cuda.cc:5] out of memory\\n')\n"
        "    os.write(2, b'no newline at the end')\n"
        "os.write(2, b'|after')"
    )
    assert finished.stderr == (
        "E0000 00:00:1.5 7 cuda.cc:5] out of memory\nno newline at the end|after"
    )


def test_what_a_failing_start_wrote_comes_through():
    finished = run_python(
        "import os, sys\n"
        "from tfparallel import startup\n"
        "with startup.quiet_stderr():\n"
        "    print('from python', file=sys.stderr)\n"
        "    os.write(2, b'F0000 00:00:1.5 7 x.cc:1] broken\\n')\n"
        "    raise ImportError('libfoo.so.1: cannot open')"
    )
    assert finished.returncode == 1
    assert finished.stderr.startswith("from python\nF0000 00:00:1.5 7 x.cc:1] broken\nTraceback")
    assert finished.stderr.endswith("ImportError: libfoo.so.1: cannot open\n")


@pytest.mark.parametrize(
    "stderr",
    ["import os; os.close(2)", "import sys, io; sys.stderr = io.StringIO()",
     "import sys; sys.stderr = None"],
    ids=["closed", "notebook", "none"],
)
def test_start_without_a_real_stderr(stderr):
    finished = run_python(
        f"{stderr}\n"
        "from tfparallel import startup\n"
        "with startup.quiet_stderr(): value = 3\n"
        "print(value)"
    )
    assert finished.stdout == "3\n"


@pytest.fixture
def installed_for_older(tmp_path):
    """Metadata as setup.cfg would have written it for other versions."""
    folder = tmp_path / "tfparallel-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tfparallel\nVersion: 0.1.0\n"
        "Requires-Dist: tensorflow<2.5,>=2.4\nRequires-Dist: keras<99,>=3.0\n"
        "Requires-Dist: absl-py\nRequires-Dist: keras<1; extra == 'old'\n"
    )
    return tmp_path


@pytest.mark.slow
def test_an_untested_version_is_refused(installed_for_older):
    finished = run_python(
        "import tfparallel; tfparallel.devices",
        path=[installed_for_older],
    )
    assert finished.returncode == 1
    message = finished.stderr.splitlines()[-1]
    assert message.startswith("ImportError: tfparallel is tested with keras")
    assert message.endswith("To use this version anyway: TFPARALLEL_ANY_VERSION=1.")


@pytest.mark.slow
def test_an_untested_version_that_was_asked_for_warns_once(installed_for_older):
    import keras
    import tensorflow as tf

    finished = run_python(
        "import warnings; warnings.simplefilter('always')\n"
        "from tfparallel import startup\n"
        "startup.prepare(); startup.prepare(); startup.import_tensorflow()\n"
        "import tfparallel; tfparallel.devices",
        path=[installed_for_older],
        TFPARALLEL_ANY_VERSION="1",
    )
    assert finished.returncode == 0
    # setuptools and pip write a range in either order; so does `packaging`.
    assert finished.stderr.count("tfparallel is tested with keras") == 1
    assert "and tensorflow<2.5,>=2.4;" in finished.stderr
    assert f"Received: keras {keras.__version__}, tensorflow {tf.__version__}." in finished.stderr
    assert "`pip install 'tensorflow<2.5,>=2.4'`" in finished.stderr


def test_the_ranges_are_those_of_setup_cfg(monkeypatch):
    import configparser

    config = configparser.ConfigParser()
    config.read(TOP / "setup.cfg")
    requires = config["options"]["install_requires"].split("\n")
    lines = [line for line in requires if line and not line.startswith("#")]
    monkeypatch.setattr(startup.importlib.metadata, "requires", lambda name: lines)
    ranges = startup._tested_ranges()
    assert sorted(ranges) == ["keras", "tensorflow"]
    assert all(startup._contains(ranges["tensorflow"], v) for v in ("2.19.0", "2.21.1"))
    assert not any(startup._contains(ranges["tensorflow"], v) for v in ("2.18.1", "2.22.0"))
    assert all(startup._contains(ranges["keras"], v) for v in ("3.10.0", "3.15.1"))
    assert not any(startup._contains(ranges["keras"], v) for v in ("3.9.2", "3.16.0"))
    assert not startup._contains(ranges["keras"], "built-at-home")


def test_a_module_is_found_under_another_name(tmp_path):
    for name in ("keras_nightly-3.16.0.dev7", "tensorflow_cpu-2.99.0"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        distribution, version = name.split("-")
        name = distribution.replace("_", "-")
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (folder / "top_level.txt").write_text(distribution.partition("_")[0])
    finished = run_python(
        "import sys; sys.path = [path for path in sys.path if 'site-packages' not in path]\n"
        "from tfparallel.installed import distribution_of, version_of\n"
        "print(distribution_of('keras'), version_of('tensorflow'), version_of('absent'))\n"
        "from tfparallel.commands.main import versions; print(versions())",
        path=[tmp_path],
    )
    first, second = finished.stdout.splitlines()
    assert first == "keras-nightly 2.99.0 None", finished.stderr
    assert "tensorflow 2.99.0, keras 3.16.0.dev7" in second


def test_another_keras_backend_is_refused():
    finished = run_python("import tfparallel; tfparallel.devices", KERAS_BACKEND="jax")
    assert finished.returncode == 1
    message = finished.stderr.splitlines()[-1]
    assert message.startswith("RuntimeError: tfparallel trains Keras models on TensorFlow")
    assert "Received: backend 'jax' (from environment variable KERAS_BACKEND)" in message
    assert "KERAS_BACKEND=tensorflow" in message


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_garbage_collector_is_as_it_was_even_behind_an_import_that_fails(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), startup.without_collections():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
