"""The environment of a measurement: machine, system, versions; nothing that identifies the host."""

import datetime
import os
import pathlib
import platform


def describe():
    """Returns the environment, a dictionary of text for people."""
    return {
        "CPU": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "Logical cores": str(os.cpu_count()),
        "Memory": _memory(),
        "System": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "Python": platform.python_version(),
        "Date": datetime.date.today().isoformat(),
        # Near 0 on an idle machine.
        "Load average before the start": f"{os.getloadavg()[0]:.2f}",
    }


def cores_to_pin(num_cores):
    """Returns the first cores that this process may use; none if the system cannot pin."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))[:num_cores]


def _memory():
    kib = _field("/proc/meminfo", "MemTotal")
    return f"{int(kib.split()[0]) / 2**20:.0f} GiB" if kib else "unknown"


def _field(path, name):
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
