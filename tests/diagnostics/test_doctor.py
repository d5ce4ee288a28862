"""The doctor's parts, on real ports, names, folders and packages."""

import contextlib
import json
import socket
import sys

import psutil
import pytest

from tfparallel.cluster import cgroup
from tfparallel.cluster.ports import free_ports
from tfparallel.diagnostics import doctor
from tfparallel.diagnostics.host import examine_cores, examine_disk, examine_memory
from tfparallel.diagnostics.reach import examine_cluster
from tfparallel.diagnostics.report import Finding, worst

PEER_SECONDS = 0.5


@pytest.fixture
def names_workers(monkeypatch):
    def name(*addresses, index=0):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": list(addresses)}, "task": task}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    return name


def by_check(findings):
    checks = {finding.check: finding for finding in findings}
    assert len(checks) == len(findings)
    return checks


def test_the_worst_verdict():
    findings = [Finding("a", verdict, "") for verdict in ("ok", "broken", "warn")]
    assert worst(findings) == "broken" and worst(findings[:1]) == worst([]) == "ok"


def test_a_process_alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    cluster, findings = examine_cluster(PEER_SECONDS)
    assert cluster.num_workers == 1
    assert [(finding.check, finding.verdict) for finding in findings] == [("cluster", "ok")]


def test_a_bad_tf_config(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "a:1"]}, "task": {}}')
    (finding,) = examine_cluster(PEER_SECONDS)[1]
    assert finding.verdict == "broken"
    assert "same address" in finding.meaning and "TF_CONFIG" in finding.meaning


def test_a_cluster_before_and_while_it_starts(names_workers):
    first, second, third = free_ports(3)
    names_workers(*(f"127.0.0.1:{port}" for port in (first, second, third)), index=1)
    with socket.create_server(("127.0.0.1", third)):
        cluster, findings = examine_cluster(PEER_SECONDS)
    checks = by_check(findings)
    assert (cluster.num_workers, cluster.num_local_workers) == (3, 3)
    assert worst(findings) == "ok" and set(checks) == {"cluster", "own port", "peers"}
    assert f"3 workers; this is worker 1, 127.0.0.1:{second}" in checks["cluster"].meaning
    assert checks["peers"].meaning == "2 of 2 can be reached; nothing listens yet on 1 of them"


def test_a_busy_port_and_who_holds_it(names_workers):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        names_workers(f"127.0.0.1:{port}", f"127.0.0.1:{free_ports(1)[0]}")
        checks = by_check(examine_cluster(PEER_SECONDS)[1])
    assert checks["own port"].verdict == "broken"
    # By this very process, whose command line is long.
    assert f"{port} is used by process " in checks["own port"].meaning


def test_a_peer_whose_name_is_unknown(names_workers):
    # RFC 2606: no name under .invalid ever resolves.
    names_workers(f"127.0.0.1:{free_ports(1)[0]}", "no-such-host.invalid:2222")
    checks = by_check(examine_cluster(PEER_SECONDS)[1])
    assert checks["worker 1"].verdict == "broken"
    assert checks["worker 1"].meaning.startswith("no-such-host.invalid:2222 cannot be reached: ")
    assert "peers" not in checks


@pytest.mark.skipif(sys.platform != "linux", reason="Linux drops what a full queue cannot take")
def test_a_peer_that_does_not_answer(names_workers):
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        names_workers(
            f"127.0.0.1:{free_ports(1)[0]}", f"127.0.0.1:{silent.getsockname()[1]}"
        )
        checks = by_check(examine_cluster(PEER_SECONDS)[1])
    assert checks["worker 1"].verdict == "broken"
    assert "cannot be reached: no answer in 0.5 s" in checks["worker 1"].meaning


def test_an_address_of_another_host(names_workers):
    port, other = free_ports(2)
    names_workers(f"192.0.2.1:{port}", f"127.0.0.1:{other}")
    checks = by_check(examine_cluster(PEER_SECONDS)[1])
    assert checks["own address"].verdict == "warn"
    assert "192.0.2.1 is not an address of this host" in checks["own address"].meaning


def test_disk(tmp_path):
    (finding,) = examine_disk(str(tmp_path / "not" / "yet"), min_free_mib=1)
    assert finding.verdict == "ok" and str(tmp_path / "not" / "yet") in finding.meaning
    (finding,) = examine_disk(str(tmp_path), min_free_mib=1e12)
    assert finding.verdict == "broken" and "are required (--min_free_mib)" in finding.meaning


def test_a_folder_that_cannot_be_written_to():
    # Not even root may.
    (finding,) = examine_disk("/proc/self", min_free_mib=None)
    assert finding.verdict == "broken" and "is not writable" in finding.meaning


def test_a_containers_limits(tmp_path, monkeypatch):
    for name, text in {
        "memory.max": f"{1500 * 2**20}\n",
        "memory.current": f"{300 * 2**20}\n",
        "cpu.max": "50000 100000\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    (memory,) = examine_memory(1)
    within = "1.2 GiB free within the limit of this container or job"
    assert (memory.verdict, memory.meaning) == ("ok", within)
    (memory,) = examine_memory(2)
    assert memory.verdict == "warn" and "for 2 workers on this host" in memory.meaning
    (cores,) = examine_cores(1)
    assert cores.verdict == "warn" and "CPU quota of this container or job is 0.5" in cores.meaning
    assert "TF_NUM_INTRAOP_THREADS=1" in cores.advice
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    # As advised, or as `launch` does.
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    assert next(examine_cores(1)).verdict == "ok"
    for name in ("memory.max", "cpu.max"):
        (tmp_path / name).write_text("max 100000\n" if name == "cpu.max" else "max\n")
    assert "on the host" in next(examine_memory(1)).meaning
    assert next(examine_cores(1)).verdict == "ok"


def test_the_tightest_limit_of_nested_groups(tmp_path, monkeypatch):
    """As Slurm nests them: the limit is that of the step, and the job's is wider."""
    groups = tmp_path / "cgroup"
    groups.write_text("5:cpuset:/\n0::/slurm/job_7/step_0\n")
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", groups)
    limits = {"slurm": None, "slurm/job_7": (800, 2), "slurm/job_7/step_0": (400, 3)}
    for folder, limit in limits.items():
        (tmp_path / folder).mkdir()
        if limit is not None:
            memory, cores = limit
            (tmp_path / folder / "memory.max").write_text(f"{memory * 2**20}\n")
            (tmp_path / folder / "memory.current").write_text(f"{2**20}\n")
            (tmp_path / folder / "cpu.max").write_text(f"{cores * 100_000} 100000\n")
    assert cgroup.free_memory_bytes() == 399 * 2**20
    assert cgroup.cpu_quota() == 2
    groups.write_text("4:memory:/there\n3:cpu,cpuacct:/there\n")  # Version 1.
    for folder in ("memory/there", "cpu/there"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "memory/there/memory.limit_in_bytes").write_text(f"{3 * 2**20}\n")
    (tmp_path / "memory/there/memory.usage_in_bytes").write_text(f"{2**20}\n")
    (tmp_path / "cpu/there/cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu/there/cpu.cfs_period_us").write_text("100000\n")
    assert (cgroup.free_memory_bytes(), cgroup.cpu_quota()) == (2 * 2**20, 1.5)


def test_more_workers_than_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    (finding,) = examine_cores(1000)
    assert finding.verdict == "warn" and "for 1000 workers on this host" in finding.meaning


def test_versions_against_the_tested_ones(tmp_path, monkeypatch):
    folder = tmp_path / "tfparallel-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tfparallel\nVersion: 0.1.0\nRequires-Python: <3.4,>=3.3\n"
        "Requires-Dist: keras<1,>=0.5\nRequires-Dist: no-such-package\nRequires-Dist: numpy\n"
        "Requires-Dist: not-asked-for; extra == 'test'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    checks = by_check(list(doctor._examine_versions()))
    assert {name: finding.verdict for name, finding in checks.items()} == {
        "Python": "warn", "keras": "warn", "no-such-package": "broken", "versions": "ok",
    }  # fmt: skip
    assert "is not a tested version (<1,>=0.5)" in checks["keras"].meaning
    assert checks["keras"].advice == "pip install 'keras<1,>=0.5'"
    assert checks["versions"].meaning.startswith("numpy ")


def test_a_tensorflow_that_does_not_answer():
    *_, finding = doctor.examine(quick=True, probe_timeout_seconds=0.05)
    assert (finding.check, finding.verdict) == ("TensorFlow", "broken")
    assert "no answer in 0.05 s" in finding.meaning
    probes = [
        child for child in psutil.Process().children()
        if "tfparallel.diagnostics.probes" in child.cmdline()
    ]  # fmt: skip
    assert probes == []


@pytest.mark.parametrize(
    "code, reason",
    [
        ("raise ImportError('libfoo.so.1')", "exit code 1: ImportError: libfoo.so.1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)",
         "killed by SIGILL, usually because the CPU lacks"),
    ],
)  # fmt: skip
def test_a_tensorflow_that_crashes(tmp_path, monkeypatch, code, reason):
    (tmp_path / "tensorflow.py").write_text(code)
    (tmp_path / "keras.py").write_text("import tensorflow")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    *_, finding = doctor.examine(quick=True, probe_timeout_seconds=60)
    assert finding.verdict == "broken" and reason in finding.meaning


@pytest.mark.parametrize(
    "ours, theirs, verdict, meaning",
    [
        ({"difference": 0.0}, {"difference": 1e-12}, "ok", "TensorFlow's own strategy too"),
        ({"difference": 0.0}, {"error": "ValueError: x"}, "warn", "strategy fails with ValueError"),
        ({"difference": 0.0}, {"difference": 0.2}, "warn", "difference 2e-01"),
        ({"difference": 0.2}, {"difference": 0.0}, "broken", "tfparallel silently trains to"),
        ({"error": "OSError: y"}, {"difference": 0.0}, "broken", "tfparallel fails with OSError"),
    ],
)
def test_the_verdict_on_a_fault(ours, theirs, verdict, meaning):
    code = f"print('chatter'); print({json.dumps(json.dumps({'ours': ours, 'theirs': theirs}))})"
    command = [sys.executable, "-c", code]
    lines, error = doctor.run_probe(command, 60)
    finding = doctor._fault_finding("clipping", lines[-1], error, command)
    assert finding.verdict == verdict and meaning in finding.meaning
    # What tfparallel does wrong is no fault of others.
    assert finding.is_upstream == (verdict != "broken")


def test_a_fault_that_crashed_is_told_and_so_are_two_workers():
    finding = doctor._fault_finding("clipping", None, "killed by SIGSEGV", ["probe"])
    assert finding.verdict == "broken" and "did not complete: killed by SIGSEGV" in finding.meaning
    finding = doctor._workers_finding({"ours": {"difference": 0.0}}, "", ["probe"])
    assert finding.verdict == "ok" and "they connect" in finding.meaning and not finding.is_upstream
    finding = doctor._workers_finding({"ours": {"error": "RuntimeError: x"}}, "", ["probe"])
    assert finding.verdict == "broken" and "tfparallel fails with RuntimeError" in finding.meaning
