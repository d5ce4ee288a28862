"""Holds back TensorFlow's warning that a function is traced often, where that is the purpose."""

import contextlib
import logging
from collections.abc import Iterator

import tensorflow as tf

__all__ = ["without_retracing_warnings"]


@contextlib.contextmanager
def without_retracing_warnings() -> Iterator[None]:
    """Within it TensorFlow does not warn of functions that are traced again.

    What trains several models traces a step for each, and TensorFlow counts them together.
    """
    logger, hold_back = tf.get_logger(), _HoldBack()
    logger.addFilter(hold_back)
    try:
        yield
    finally:
        logger.removeFilter(hold_back)


class _HoldBack(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in record.getMessage()
