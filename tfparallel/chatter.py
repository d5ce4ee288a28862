"""Lines without news that TensorFlow's C++ code writes to stderr."""

import glob
import os
import re

_VERBOSE = "TFPARALLEL_VERBOSE"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"

# The prefix of errors and warnings, in the new form, and in the old one of TensorFlow 2.19.
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
            # The list in the message about workers that are not ready yet.
            rb"/job:\w+/replica:\d+/task:\d+\s*$",
            # Two libraries of one CUDA build register the same factory: harmless.
            _PREFIX + rb".*Unable to register cu\w+ factory",
            # The launcher reports which workers it stopped.
            _PREFIX + rb".*preemption_notifier\.cc:\d+\] SIGTERM caught",
            _PREFIX + rb".*computation placer already registered",
            # A newer library wrote an attribute into a graph that this one ignores.
            _PREFIX + rb".*NodeDef mentions attribute \S+ which is not in the op definition",
            # XLA measures kernels on a shared GPU.
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
    """Whether a text may contain such a line.

    Args:
        text: Any number of lines.
    """
    return bool(_CHATTER.search(text) or _CHATTER_WITHOUT_GPU.search(text))


def wants_quiet() -> bool:
    """Whether to suppress such lines: unless the environment asks for them."""
    if os.environ.get(_VERBOSE, "") not in ("", "0"):
        return False
    # Level 0 asks for information. Level 1 and above do not, yet TensorFlow
    # prints messages that it logs before it reads the level.
    return os.environ.get(_LEVEL) != "0"


def has_nvidia_gpu() -> bool:
    """Whether the system has an NVIDIA GPU, whatever TensorFlow sees.

    Returns:
        True if a GPU's device file exists (`/dev/dxg` under WSL).
    """
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/dxg")
