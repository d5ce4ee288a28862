"""MPI's library as mpi4py finds it, and the all-reduce algorithms that MPICH has.

| name | algorithm | latency and volume, n ranks, S bytes |
| --- | --- | --- |
| `mpi_recursive_doubling` | partners at distance 1, 2, 4, … swap all they have | log₂n·(α + Sβ) |
| `mpi_reduce_scatter_all_gather` | the same by halves, there and back (Rabenseifner) | \
2log₂n·α + 2(n−1)/n·Sβ |
| `mpi_ring` | 2(n−1) steps around a ring, S/n each | 2(n−1)α + 2(n−1)/n·Sβ |
| `mpi_tree` | up a tree and down again, in pipelined pieces | 2log₂n·α + 2Sβ |
| `mpi_library` | the library's own choice, whichever library it is | |

MPICH chooses by *control variables*, which MPI's tool interface (MPI-3, chapter 15) can write
while the program runs. mpi4py does not wrap that interface; it is called by ctypes here.

References:
    Rajeev Thakur, Rolf Rabenseifner, William Gropp, "Optimization of Collective Communication
    Operations in MPICH", International Journal of High Performance Computing Applications 19(1),
    2005.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import types
from collections.abc import Iterator

PIP = "pip install 'tfparallel[mpi]'"
# Values of MPICH's variable, by the order in which it lists them.
MPICH_ALGORITHMS = {
    "mpi_library": 0,
    "mpi_recursive_doubling": 4,
    "mpi_reduce_scatter_all_gather": 5,
    "mpi_tree": 8,
    "mpi_ring": 9,
}
_ALGORITHM_VARIABLE = "MPIR_CVAR_IALLREDUCE_INTRA_ALGORITHM"
_FALLBACK_VARIABLE = "MPIR_CVAR_COLLECTIVE_FALLBACK"
_RAISE = 0  # Rather than to take another algorithm than the one asked for.
_THREAD_MULTIPLE = 3
_MEMORY_EVENTS, _RDMA = "UCX_MEM_EVENTS", "/sys/class/infiniband"


def is_installed() -> bool:
    """Whether mpi4py is there; it may still find no library."""
    return importlib.util.find_spec("mpi4py") is not None


def missing() -> str | None:
    """Returns why mpi4py and its library cannot be used here, or None; MPI is not started."""
    try:
        _module()
    except (ImportError, RuntimeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def speaks_pmi() -> bool:
    """Whether the library is started as MPICH is, so that `start` can do it; it must be there."""
    version = _module().Get_library_version()
    return "MPICH" in version or version.startswith("Intel(R) MPI")


def load() -> types.ModuleType:
    """Starts MPI, unless the program has.

    mpi4py would start it while it is imported, and hold Python's lock until all processes have
    met; called through ctypes, other threads go on, such as the one that they meet in.

    Returns:
        The module `mpi4py.MPI`.

    Raises:
        ImportError: If mpi4py or MPI's library is missing: see `missing`.
        RuntimeError: If MPI cannot start.
    """
    mpi = _module()
    if not mpi.Is_initialized():
        start = ctypes.CDLL(mpi.__file__).MPI_Init_thread
        failed = start(None, None, _THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        if failed:
            raise RuntimeError(f"MPI cannot start. Received: error {failed} from MPI_Init_thread.")
        # As mpi4py does: errors become exceptions.
        mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
        mpi.COMM_SELF.Set_errhandler(mpi.ERRORS_RETURN)
    return mpi


def _module() -> types.ModuleType:
    rc = importlib.import_module("mpi4py").rc
    rc.initialize = False
    rc.finalize = False  # It waits for the others, of which one may be dead.
    with _without_memory_events():
        return importlib.import_module("mpi4py.MPI")


@contextlib.contextmanager
def _without_memory_events() -> Iterator[None]:
    """Has UCX, below MPICH, not follow each mapping of memory, where it has no use for that.

    It keeps 144 bytes for each until a network card with RDMA reads them; and Python maps memory
    for each call from a thread of TensorFlow's. UCX reads its environment once, when it is loaded.
    """
    if _MEMORY_EVENTS in os.environ or os.path.isdir(_RDMA):
        yield
        return
    os.environ[_MEMORY_EVENTS] = "n"
    try:
        yield
    finally:
        del os.environ[_MEMORY_EVENTS]


class AlgorithmVariable:
    """MPICH's variable that chooses the algorithm of all-reduces, in this process."""

    def __init__(self, mpi: types.ModuleType):
        self._mpi = mpi
        self._library = ctypes.CDLL(mpi.__file__)
        self._handle = None

    def write(self, name: str) -> None:
        """Makes all-reduces that do not block use one of `MPICH_ALGORITHMS` from now on.

        Raises:
            ValueError: If the library is not MPICH, or has no such algorithm.
        """
        try:
            if self._handle is None:
                level = ctypes.c_int()
                self._library.MPI_T_init_thread(_THREAD_MULTIPLE, ctypes.byref(level))
                self._set(self._handle_of(_FALLBACK_VARIABLE), _RAISE)
                self._handle = self._handle_of(_ALGORITHM_VARIABLE)
            self._set(self._handle, MPICH_ALGORITHMS[name])
        except (AttributeError, OSError) as error:
            if name == "mpi_library":
                return
            version = self._mpi.Get_library_version().splitlines()[0]
            raise ValueError(
                f"'{name}' is an algorithm of MPICH's library, which lets programs choose. MPICH "
                f"is required. Received: {version} ({error}). Take all_reduce='mpi' or "
                "'mpi_library'."
            ) from None

    def _handle_of(self, name):
        index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        if self._library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)):
            raise OSError(f"it has no {name}")
        arguments = (index, None, ctypes.byref(handle), ctypes.byref(count))
        if self._library.MPI_T_cvar_handle_alloc(*arguments):
            raise OSError(f"{name} cannot be reached")
        return handle

    def _set(self, handle, value):
        if self._library.MPI_T_cvar_write(handle, ctypes.byref(ctypes.c_int(value))):
            raise OSError("it cannot be told")
