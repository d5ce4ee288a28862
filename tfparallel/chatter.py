"""Lines that TensorFlow's C++ code writes to stderr, of which a person needs none."""

import glob
import os
import re

__all__ = ["has_nvidia_gpu", "is_chatter", "wants_quiet"]

_VERBOSE = "TFPARALLEL_VERBOSE"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"

# Of errors and warnings, in the new and in the old form, which TensorFlow 2.19 has.
_PREFIX = r"([EW]\d{4} |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [EW] )"
_CHATTER = re.compile(
    "|".join(
        [
            r"WARNING: All log messages before absl::InitializeLog\(\)",
            # Information, in the old and in the new form of the log's prefix.
            r"I\d{4} \d",
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I ",
            # The second line of the message about CPU instructions.
            r"To enable the following instructions: ",
            # Those of the message about workers that are not there yet.
            r"/job:\w+/replica:\d+/task:\d+\s*$",
            # Two libraries of one CUDA build register the same factory: harmless.
            _PREFIX + r".*Unable to register cu\w+ factory",
            # The launcher says whom it has stopped.
            _PREFIX + r".*preemption_notifier\.cc:\d+\] SIGTERM caught",
            _PREFIX + r".*computation placer already registered",
            # What a newer library wrote into a graph, which this one leaves out.
            _PREFIX + r".*NodeDef mentions attribute \S+ which is not in the op definition",
            # XLA measures kernels on a GPU that others use, too.
            _PREFIX + r".*Delay kernel timed out",
            # A data set ends after Python.
            _PREFIX + r".*finalizing GeneratorDataset iterator: .*Python interpreter state",
        ]
    )
)
# News on a machine that has a GPU, noise on one that has none.
_CHATTER_WITHOUT_GPU = re.compile(_PREFIX + r".*failed call to cuInit")


def is_chatter(line: bytes, has_gpu: bool) -> bool:
    """Whether a line of stderr carries no news.

    Args:
        line: With or without its end.
        has_gpu: Whether the host has an NVIDIA GPU.
    """
    text = line.decode(errors="replace")
    return bool(_CHATTER.match(text) or (not has_gpu and _CHATTER_WITHOUT_GPU.match(text)))


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
