"""The options of a job on Ray, which need no Ray; and what is told where Ray is missing."""

import subprocess
import sys

import pytest

from tfparallel.ray.fit import fit
from tfparallel.ray.options import (
    RayOptions,
    parse_num_workers,
    parse_resources,
    parse_storage_path,
)


def test_all_problems_are_told_at_once():
    with pytest.raises(ValueError) as caught:
        options = {"max_failures": -2, "resources_per_worker": {}, "storage_path": "s3://bucket"}
        fit(print, (3, 2), placement_strategy="NEAR", **options)
    text = str(caught.value)
    for problem in (
        "the second of num_workers must not be less than the first",
        "max_failures must be a whole number of at least 0, or -1 for no limit",
        "resources_per_worker must have positive numbers",
        "storage_path must be a folder that all nodes mount, not a URL",
        "placement_strategy must be one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD",
        "num_workers=(3, 2)",
    ):
        assert problem in text


@pytest.mark.parametrize("number", [0, 1.5, True, (0, 2), (1, "2"), "2"])
def test_a_number_of_workers_is_a_whole_number(number):
    with pytest.raises(ValueError, match="num_workers must be a whole number of at least 1"):
        fit(print, number)


def test_the_forms_of_the_command_line():
    assert parse_num_workers("3") == (3, 3)
    assert parse_num_workers("2:4") == (2, 4)
    assert parse_resources("CPU=4,GPU=0.5") == {"CPU": 4, "GPU": 0.5}
    RayOptions(parse_num_workers("2:4"), parse_resources("CPU=2"))


@pytest.mark.parametrize("text", ["", "2:", ":4", "0", "4:2", "two"])
def test_other_forms_are_refused(text):
    with pytest.raises(ValueError, match=f"Received: '{text}'"):
        parse_num_workers(text)


def test_a_storage_path_is_a_folder():
    assert parse_storage_path("/shared/run") == "/shared/run"
    with pytest.raises(ValueError, match="not a URL. Received: s3://bucket"):
        parse_storage_path("s3://bucket")


def test_a_resource_needs_a_number():
    with pytest.raises(ValueError, match="NAME=NUMBER is required. Received: 'GPU'"):
        parse_resources("CPU=1,GPU")


MISSING = """
import sys
sys.modules["ray"] = None  # Python then finds none.
import tfparallel
try:
    tfparallel.ray.fit(print)
except ImportError as error:
    print(error)
print([name for name in ("ray", "tensorflow") if sys.modules.get(name)])
"""


def test_a_missing_ray_is_told():
    done = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=60, check=True
    )
    message, loaded = done.stdout.splitlines()
    assert message.startswith("Jobs on Ray need the package ray, which is not installed.")
    assert "pip install 'tfparallel[ray]'" in message
    assert loaded == "[]"
