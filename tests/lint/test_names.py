"""One word for one thing: modules and classes have the names of the field."""

import ast
import pathlib

LIBRARY = pathlib.Path(__file__).parents[2] / "tfparallel"
# What they were called once, and are called.
NAMES = {
    "ahead": "build",
    "anywhere": "ops",
    "by_hand": "parallel_hints",
    "came_first": "early_init",
    "claims": "launcher_env",
    "complete": "copy_state",
    "door": "acceptor",
    "forms": "parallelism",
    "guarded": "worker_process",
    "guardian": "reaper",
    "host_share": "local_workers",
    "leaving": "coordination",
    "likeness": "verify_clone",
    "lost": "lost_worker",
    "meeting": "worker_rendezvous",
    "newer_keras": "keras_compat",
    "node_news": "control_channel",
    "nodes": "rendezvous",
    "notice": "user_log",
    "numbers_of_task": "precision",
    "on_task": "runner",
    "participants": "group",
    "presence": "liveness",
    "quorum": "membership",
    "screening": "output_filter",
    "sendable": "pickling",
    "standby": "warm_spares",
    "stopping": "coordination",
    "worker_choice": "transport_selection",
    "writes": "processes",
    "Door": "Acceptor",
    "Form": "Parallelism",
    "GuardedWorker": "WorkerProcess",
    "NodeMeeting": "Rendezvous",
    "NodeNews": "ControlChannel",
    "Screening": "OutputFilter",
    "Standbys": "WarmSpares",
    "StopAgreement": "PreemptionSync",
    "WorkerGroup": "ProcessGroup",
    "WrittenByHand": "ParallelHint",
}


def test_modules_and_classes_have_the_names_of_the_field():
    found = set()
    for path in LIBRARY.rglob("*.py"):
        found.add(path.stem)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert not {old: NAMES[old] for old in found & NAMES.keys()}
