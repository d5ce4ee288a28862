"""Networks that a check must pass without a fault, and fail with each of three.

`TFPARALLEL_NETWORKS=all` (`make networks`) runs all of them, minutes each;
`python -m tests.networks` prints them as a table.
"""

import importlib.util
import os

import keras
import pytest

from tests import networks
from tests.parity.case import precision

WHOLE = os.environ.get("TFPARALLEL_NETWORKS") == "all"
ALL = [(name, dtype) for name in networks.NETWORKS for dtype in ("float32", "float64")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), ALL if WHOLE else [("MobileNet", "float64")])
def test_a_network_passes_and_its_faults_do_not(name, dtype):
    if name.startswith("Hub") and importlib.util.find_spec("keras_hub") is None:
        pytest.skip("KerasHub is not installed, and no dependency")
    with precision(dtype):
        keras.utils.set_random_seed(0)
        verdicts = networks.verdicts(name, dtype)
    assert verdicts == dict.fromkeys(verdicts, True)
