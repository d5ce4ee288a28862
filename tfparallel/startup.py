"""Starts TensorFlow: quietly, on the right Keras backend, in a tested version.

TensorFlow writes a screenful to the terminal before the user's program prints
its first line, some of it before any log level is read. Lines that are known to
carry no news are suppressed here; every other line comes through. Set
`TFPARALLEL_VERBOSE=1` (or `TF_CPP_MIN_LOG_LEVEL=0`) to see them all.
"""

import contextlib
import gc
import importlib
import importlib.metadata
import logging
import os
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from tfparallel.chatter import has_nvidia_gpu, is_chatter, wants_quiet
from tfparallel.installed import distribution_of

_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_ANY_VERSION_VARIABLE = "TFPARALLEL_ANY_VERSION"
# Errors stay visible while a program runs; information and warnings do not.
_QUIET_LEVEL = "2"

_lock = threading.RLock()
_state = {"prepared": False}


def import_tensorflow() -> types.ModuleType:
    """Imports TensorFlow as `prepare()` does, and returns the module.

    Use it instead of `import tensorflow as tf` in a module that a user may
    import before anything else.

    Returns:
        The module `tensorflow`.

    Raises:
        RuntimeError: If Keras is set to another backend than TensorFlow.
    """
    prepare()
    return sys.modules["tensorflow"]


def prepare() -> None:
    """Loads TensorFlow and Keras without chatter, and checks both.

    The first call does the work; later calls return at once. The tested
    versions are those in `setup.cfg`; TFPARALLEL_ANY_VERSION=1 allows others,
    with one warning.

    Raises:
        RuntimeError: If Keras is set to another backend than TensorFlow.
        ImportError: If the version of TensorFlow or Keras was not tested.
    """
    with _lock:
        if _state["prepared"]:
            return
        _check_backend(os.environ.get("KERAS_BACKEND"), "environment variable KERAS_BACKEND")
        if wants_quiet():
            os.environ.setdefault(_LEVEL_VARIABLE, _QUIET_LEVEL)
        is_new = "tensorflow" not in sys.modules
        with quiet_stderr(), without_collections():
            tensorflow = importlib.import_module("tensorflow")
            keras = importlib.import_module("keras")
        # In a notebook and at Python's prompt, TensorFlow also shows information. A level that the
        # user set stays.
        logger = tensorflow.get_logger()
        if is_new and wants_quiet() and logger.level == logging.INFO:
            logger.setLevel(logging.WARNING)
        _check_backend(keras.backend.backend(), "keras.json, or the code that imported keras first")
        _check_versions(
            {"tensorflow": tensorflow.__version__, "keras": keras.__version__}
        )
        _state["prepared"] = True


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pauses the garbage collector while many long-lived objects are created.

    Collections took 0.8 of the 5.9 s of an import, and 1.2 of the 6.6 s of a trace of MobileNetV2.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Suppresses TensorFlow's known chatter while the block runs.

    C++ code writes to file descriptor 2 and does not use `sys.stderr`, so the
    descriptor itself is redirected to a temporary file; all other lines are
    written out when the block ends, even by an exception.

    Yields:
        Nothing.
    """
    if not wants_quiet():
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            log = stack.enter_context(tempfile.TemporaryFile())
            screen = os.dup(2)
        except OSError:
            # A daemon without descriptor 2, or no space for a temporary file:
            # chatter is better than a failure.
            yield
            return
        stack.callback(os.close, screen)
        _flush_stderr()
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            _flush_stderr()
            os.dup2(screen, 2)
            log.seek(0)
            has_gpu = has_nvidia_gpu()
            lines = b"".join(line for line in log if not is_chatter(line, has_gpu))
            if lines:
                # Into a duplicate: closing the file object must not close 2.
                with os.fdopen(os.dup(2), "wb") as stderr:
                    stderr.write(lines)


def _flush_stderr():
    # A notebook, or a program under pythonw, may have no stderr.
    if sys.stderr is not None:
        with contextlib.suppress(ValueError, OSError):
            sys.stderr.flush()


def _check_backend(backend, origin):
    if backend in (None, "", "tensorflow"):
        return
    raise RuntimeError(
        "tfparallel trains Keras models on TensorFlow; Keras's backend must be 'tensorflow'. "
        f"Received: backend {backend!r} (from {origin}). "
        "Set KERAS_BACKEND=tensorflow before Python starts, "
        "or `os.environ['KERAS_BACKEND'] = 'tensorflow'` above the first import of keras."
    )


def _tested_ranges():
    """Reads the ranges from the installed metadata, which setup.cfg wrote."""
    try:
        lines = importlib.metadata.requires("tfparallel") or []
    except importlib.metadata.PackageNotFoundError:
        # Run from a source tree without installation, which promises nothing.
        return {}
    requirements = [Requirement(line) for line in lines]
    return {
        requirement.name: requirement.specifier
        for requirement in requirements
        if requirement.name in ("tensorflow", "keras") and requirement.marker is None
    }


def _check_versions(versions):
    tested = _tested_ranges()
    outside = [
        name
        for name, version in versions.items()
        if name in tested and not _contains(tested[name], version)
    ]
    if not outside:
        return
    ranges = " and ".join(f"{name}{specifier}" for name, specifier in sorted(tested.items()))
    received = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    fix = "pip install " + " ".join(f"'{name}{tested[name]}'" for name in sorted(outside))
    # keras-nightly and keras install into the same module.
    others = {distribution_of(name) for name in outside} - {*outside, None}
    if others:
        fix = f"pip uninstall {' '.join(sorted(others))} && {fix}"
    message = (
        f"tfparallel is tested with {ranges}; with another version its results may be wrong. "
        f"Received: {received}. To install a tested version: `{fix}`."
    )
    if os.environ.get(_ANY_VERSION_VARIABLE, "") in ("", "0"):
        raise ImportError(f"{message} To use this version anyway: {_ANY_VERSION_VARIABLE}=1.")
    # The lazy import hides the user's own line.
    warnings.warn(message, stacklevel=2)


def _contains(specifier, version):
    try:
        return specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        # A private build with its own version scheme was not tested.
        return False
