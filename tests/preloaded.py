"""What the fork server of tests imports before it forks: everything that takes long.

No runtime may start here: a process that has threads, or an eager context, cannot be forked.
"""

import gc
import importlib

from tfparallel import startup

startup.prepare()
for _name in (
    "tfparallel.data",
    "tfparallel.callbacks",
    "tfparallel.devices",
    "tfparallel.hybrid.hybrid_parallel",
    "tfparallel.replication.drop_in_strategies",
):
    importlib.import_module(_name)
gc.collect()
gc.freeze()  # What is here is shared with every child, for as long as nobody writes to it.
