"""The cluster knows no TensorFlow, and its tests have nothing of Keras to seed or to clear."""

import pytest


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Replaces the fixture of all other tests, which takes longer than most tests here."""
