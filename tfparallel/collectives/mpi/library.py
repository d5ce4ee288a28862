"""The MPI library that mpi4py finds, and the all-reduce algorithms of MPICH.

| name | algorithm | latency and volume, n ranks, S bytes |
| --- | --- | --- |
| `mpi_recursive_doubling` | partners at distance 1, 2, 4, … swap full vectors | log₂n·(α + Sβ) |
| `mpi_reduce_scatter_all_gather` | the same by halves, and back (Rabenseifner) | \
2log₂n·α + 2(n−1)/n·Sβ |
| `mpi_ring` | 2(n−1) steps around a ring, S/n each | 2(n−1)α + 2(n−1)/n·Sβ |
| `mpi_tree` | up a tree and down again, in pipelined pieces | 2log₂n·α + 2Sβ |
| `mpi_library` | the library's own choice, with any MPI library | |

In MPICH, *control variables* select the algorithm. MPI's tool interface (MPI-3, chapter 15) can set
them at run time. mpi4py does not wrap that interface, so this module calls it through ctypes.

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
# Values of MPICH's variable, in the order of its own list.
MPICH_ALGORITHMS = {
    "mpi_library": 0,
    "mpi_recursive_doubling": 4,
    "mpi_reduce_scatter_all_gather": 5,
    "mpi_tree": 8,
    "mpi_ring": 9,
}
_ALGORITHM_VARIABLE = "MPIR_CVAR_IALLREDUCE_INTRA_ALGORITHM"
_FALLBACK_VARIABLE = "MPIR_CVAR_COLLECTIVE_FALLBACK"
_RAISE = 0  # Fail, instead of silently falling back to another algorithm.
_THREAD_MULTIPLE = 3
_MEMORY_EVENTS, _RDMA = "UCX_MEM_EVENTS", "/sys/class/infiniband"


def is_installed() -> bool:
    """Whether mpi4py is installed; it may still not find an MPI library."""
    return importlib.util.find_spec("mpi4py") is not None


def missing() -> str | None:
    """Returns why mpi4py and its library cannot be used here, or None. Does not start MPI."""
    try:
        _module()
    except (ImportError, RuntimeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def speaks_pmi() -> bool:
    """Whether `workers.join` can start the library as it starts MPICH; it must be installed."""
    version = _module().Get_library_version()
    return "MPICH" in version or version.startswith("Intel(R) MPI")


def load() -> types.ModuleType:
    """Starts MPI, unless it is already running.

    mpi4py would start MPI during its import, and hold the GIL until all processes have connected.
    Called through ctypes, MPI lets other threads run, such as the server that they connect to.

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
        # As in mpi4py, turn errors into exceptions.
        mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
        mpi.COMM_SELF.Set_errhandler(mpi.ERRORS_RETURN)
    return mpi


def _module() -> types.ModuleType:
    rc = importlib.import_module("mpi4py").rc
    rc.initialize = False
    rc.finalize = False  # MPI_Finalize waits for the other workers, which may be dead.
    with _without_memory_events():
        return importlib.import_module("mpi4py.MPI")


@contextlib.contextmanager
def _without_memory_events() -> Iterator[None]:
    """Stops UCX, which MPICH uses, from tracking memory mappings on hosts without RDMA.

    UCX stores 144 bytes per mapping until an RDMA network card consumes them, and Python maps
    memory for each call from a TensorFlow thread. UCX reads its environment once, when loaded.
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
    """MPICH's control variable for the all-reduce algorithm, in this process."""

    _written: str | None = None  # By whichever communicator of the process.

    def __init__(self, mpi: types.ModuleType):
        self._mpi = mpi
        self._library = ctypes.CDLL(mpi.__file__)
        self._handle = None

    def write(self, name: str) -> None:
        """Selects one of `MPICH_ALGORITHMS` for non-blocking all-reduces.

        Raises:
            ValueError: If the library is not MPICH, or lacks the algorithm.
        """
        if name == AlgorithmVariable._written:
            return
        try:
            if self._handle is None:
                level = ctypes.c_int()
                self._library.MPI_T_init_thread(_THREAD_MULTIPLE, ctypes.byref(level))
                self._set(self._handle_of(_FALLBACK_VARIABLE), _RAISE)
                self._handle = self._handle_of(_ALGORITHM_VARIABLE)
            self._set(self._handle, MPICH_ALGORITHMS[name])
            AlgorithmVariable._written = name
        except (AttributeError, OSError) as error:
            if name == "mpi_library":
                return
            version = self._mpi.Get_library_version().splitlines()[0]
            raise ValueError(
                f"'{name}' is an algorithm of MPICH, the only library that lets programs choose "
                f"one. MPICH is required. Received: {version} ({error}). Use all_reduce='mpi' or "
                "'mpi_library'."
            ) from None

    def _handle_of(self, name):
        index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        if self._library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)):
            raise OSError(f"it has no {name}")
        arguments = (index, None, ctypes.byref(handle), ctypes.byref(count))
        if self._library.MPI_T_cvar_handle_alloc(*arguments):
            raise OSError(f"{name} is not accessible")
        return handle

    def _set(self, handle, value):
        if self._library.MPI_T_cvar_write(handle, ctypes.byref(ctypes.c_int(value))):
            raise OSError("it cannot be set")
