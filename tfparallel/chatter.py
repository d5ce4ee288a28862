"""Lines that TensorFlow's C++ code writes to stderr, of which a person needs none."""

import glob
import os
import re

__all__ = ["has_nvidia_gpu", "is_chatter", "may_hold_chatter", "wants_quiet"]

_VERBOSE = "TFPARALLEL_VERBOSE"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"

# Of errors and warnings, in the new and in the old form, which TensorFlow 2.19 has.
_PREFIX = rb"([EW]\d{4} |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [EW] )"
_CHATTER = re.compile(
    b"^(?:%s)"
    % b"|".join(
        [
            rb"WARNING: All log messages before absl::InitializeLog\(\)",
            # Information, in the old and in the new form of the log's prefix.
            rb"I\d{4} \d",
            rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I ",
            # The second line of the message about CPU instructions.
            rb"To enable the following instructions: ",
            # Those of the message about workers that are not there yet.
            rb"/job:\w+/replica:\d+/task:\d+\s*$",
            # Two libraries of one CUDA build register the same factory: harmless.
            _PREFIX + rb".*Unable to register cu\w+ factory",
            # The launcher says whom it has stopped.
            _PREFIX + rb".*preemption_notifier\.cc:\d+\] SIGTERM caught",
            _PREFIX + rb".*computation placer already registered",
            # What a newer library wrote into a graph, which this one leaves out.
            _PREFIX + rb".*NodeDef mentions attribute \S+ which is not in the op definition",
            # XLA measures kernels on a GPU that others use, too.
            _PREFIX + rb".*Delay kernel timed out",
            # A data set ends after Python.
            _PREFIX + rb".*finalizing GeneratorDataset iterator: .{0,300}Python interpreter state",
        ]
    ),
    re.MULTILINE,
)
# News on a machine that has a GPU, noise on one that has none.
_CHATTER_WITHOUT_GPU = re.compile(b"^" + _PREFIX + rb".*failed call to cuInit", re.MULTILINE)


def is_chatter(line: bytes, has_gpu: bool) -> bool:
    """Whether a line of stderr carries no news.

    Args:
        line: With or without its end.
        has_gpu: Whether the host has an NVIDIA GPU.
    """
    return bool(_CHATTER.match(line) or (not has_gpu and _CHATTER_WITHOUT_GPU.match(line)))


def may_hold_chatter(text: bytes) -> bool:
    """Whether a line of a text may be one of them.

    Args:
        text: Any number of lines.
    """
    return bool(_CHATTER.search(text) or _CHATTER_WITHOUT_GPU.search(text))


def wants_quiet() -> bool:
    """Whether such lines are to be held back: unless the environment asks for them."""
    if os.environ.get(_VERBOSE, "") not in ("", "0"):
        return False
    # Level 0 asks for information; 1 and above ask for none, yet TensorFlow
    # prints what it logs before it has read the level.
    return os.environ.get(_LEVEL) != "0"


def has_nvidia_gpu() -> bool:
    """Tells whether the system shows an NVIDIA GPU, whatever TensorFlow sees.

    Returns:
        True if a GPU's device file exists (`/dev/dxg` is that of WSL).
    """
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/dxg")
