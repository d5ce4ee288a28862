"""`tfparallel launch`, run as users run it, with small programs as workers."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time

import psutil
import pytest

from tests.cluster.launcher.test_output_filter import MARK, strange_lines
from tests.cluster.processes import STUBBORN_FAMILY, family, survivors, wait_for
from tests.commands.command_line import ROOT
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.worker_error import WorkerError
from tfparallel.cluster.worker_exit import Outcome, WorkerExit
from tfparallel.commands.main import main
from tfparallel.flight.culprit import with_errors

DEADLINE_SECONDS = 60


@pytest.fixture(autouse=True)
def shared_secret(monkeypatch):
    """What the launchers of several hosts know each other by."""
    monkeypatch.setenv("TFPARALLEL_JOB_TOKEN", "a-secret-of-the-tests")


def command(flags, code, *arguments):
    launch = [sys.executable, "-m", "tfparallel", "launch", *flags]
    return [*launch, "--", sys.executable, "-c", code, *map(str, arguments)]


def start(flags, code, *arguments, **options):
    return subprocess.Popen(
        command(flags, code, *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def launch(flags, code, *arguments, **environment):
    done = subprocess.run(
        command(flags, code, *arguments),
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


TELL = (
    "import json, os; names = ('TF_CONFIG', 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK',"
    " 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'TFPARALLEL_JOB_TOKEN',"
    " 'TFPARALLEL_RESTART_COUNT'); print(json.dumps({name: os.environ[name] for name in names}))"
)


def printed_by_worker(shown):
    """What the workers that ran TELL printed, by index."""
    lines = [line.partition("] ") for line in shown.splitlines()]
    return {int(name[1:]): json.loads(text) for name, _, text in lines if text.startswith("{")}


def test_workers_know_their_places():
    code, shown, errors = launch(["--nproc_per_node=3"], TELL)
    assert (code, errors) == (0, "")
    workers = printed_by_worker(shown)
    assert sorted(workers) == [0, 1, 2]
    configs = [json.loads(workers[index]["TF_CONFIG"]) for index in range(3)]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": index} for index in range(3)
    ]
    assert configs[0]["cluster"] == configs[1]["cluster"] == configs[2]["cluster"]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    for index, worker in workers.items():
        assert worker["RANK"] == worker["LOCAL_RANK"] == str(index)
        assert worker["WORLD_SIZE"] == worker["LOCAL_WORLD_SIZE"] == "3"
        assert (worker["GROUP_RANK"], worker["TFPARALLEL_RESTART_COUNT"]) == ("0", "0")
    assert len({worker["TFPARALLEL_JOB_TOKEN"] for worker in workers.values()}) == 1
    master = f"{workers[0]['MASTER_ADDR']}:{workers[0]['MASTER_PORT']}"
    assert master not in addresses


def test_streams_stay_apart():
    code, shown, errors = launch([], "import sys; print('out'); print('err', file=sys.stderr)")
    assert (code, shown, errors) == (0, "[0] out\n", "[0] err\n")


FAIL = (
    "import os, sys, time\n"
    "if os.environ['RANK'] == '1': print('cause'); sys.exit(3)\n"
    "time.sleep(600)"
)


def test_the_culprit_is_named_and_its_exit_code_kept():
    code, shown, errors = launch(["--nproc_per_node=3"], FAIL)
    assert code == 3 and shown == "[1] cause\n"
    assert "tfparallel launch: worker 1 exited with code 3 after " in errors
    assert errors.endswith(
        " s; its last lines:\n    cause\ntfparallel launch: stopped workers 0, 2\n"
    )


RECORDS = """
import os, signal, sys, time
from tfparallel.flight.record import FOLDER, FlightRecord, path_of
rank = int(os.environ["RANK"])
about = {"worker": rank, "num_workers": 2, "num_local": 2, "host": "a", "started": time.time()}
record = FlightRecord(path_of(os.environ[FOLDER], rank, 0), about)
record.now("in a step", 3, time.time())
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
while not os.path.exists(path_of(os.environ[FOLDER], 1, 0)): time.sleep(0.01)
time.sleep(0.5)
record.alive(time.time() + 10)  # As if it had waited for so long.
sys.exit(75)
"""


@pytest.mark.slow
def test_a_worker_that_is_suspended_is_named_and_not_the_one_that_waited(tmp_path, capsys):
    """Story: `launch` named worker 0, and `trace` worker 1."""
    flags = ["--nproc_per_node=2", f"--log_dir={tmp_path}", "--grace_seconds=0.1"]
    code, _, errors = launch(flags, RECORDS)
    assert code == 75 and errors.startswith("tfparallel launch: Worker 1 went silent")
    assert "worker 0 exited with code 75 after " in errors
    assert " s (to be restarted: it lost another worker, hung, or was " in errors
    assert main(["trace", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Worker 1 went silent"), shown
    assert re.findall(r"^(.) worker (\d) on ", shown, re.MULTILINE) == [(" ", "0"), ("*", "1")]


def test_death_by_signal_is_128_and_its_number():
    kill = "import os, signal, time; os.kill(os.getpid(), signal.SIGKILL)"
    code, _, errors = launch(["--nproc_per_node=2"], kill)
    assert code == 137 and "was killed by SIGKILL" in errors and "because memory ran out" in errors


SHAPES = """
import sys, tfparallel, warnings
print("I0000 00:00:1.2 3 port.cc:153] oneDNN custom operations are on.", file=sys.stderr)
warnings.warn("look")
print("mine", file=sys.stderr, flush=True)
def fit():
    raise ValueError("a shape does not fit")
fit()
"""


def test_what_all_workers_fail_by_is_told_once(tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(SHAPES)
    launch = ["launch", "--nproc_per_node=2", f"--log_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel", *launch, "--", sys.executable, str(program)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=DEADLINE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("ValueError: a shape does not fit\n") == 1, done.stderr
    assert f"  {program}, line 7, in fit: raise ValueError" in done.stderr
    assert "Traceback" not in done.stderr and "oneDNN" not in done.stderr
    assert done.stderr.count("UserWarning: look") == 1 <= done.stderr.count("mine\n") <= 2
    assert f" above; the full traceback is in {tmp_path}\n" in done.stderr
    logs = [(tmp_path / f"worker_{index}.log").read_text() for index in range(2)]
    assert any("Traceback (most recent call last):" in log and "oneDNN" in log for log in logs)


def test_a_worker_that_ended_by_the_error_was_not_stopped():
    """Story: "workers 0, 1 failed with the error above", then "stopped worker 0"."""
    error = WorkerError(["ValueError: no"], "ValueError a.py, line 1", "")
    culprit = WorkerExit(1, 1, 2.0, stopped=False)
    exits = (WorkerExit(0, 1, 2.1, stopped=True), culprit, WorkerExit(2, -15, 2.2, stopped=True))
    outcome = with_errors(Outcome(exits, culprit), {0: error, 1: error}, log_dir=None)
    assert "workers 0, 1 failed with the error above" in outcome.culprit.explain()
    assert [exit_.stopped for exit_ in outcome.exits] == [False, False, True]


FAIL_ONCE = (
    "import os, sys, time; again = os.environ['TFPARALLEL_RESTART_COUNT'] != '0'\n"
    "print('attempt', os.environ['TFPARALLEL_RESTART_COUNT'], os.environ['TF_CONFIG'])\n"
    "if not again: sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
)


def test_a_restart_that_succeeds(tmp_path):
    code, shown, errors = launch(
        ["--nproc_per_node=2", "--max_restarts=2", f"--log_dir={tmp_path}/logs"], FAIL_ONCE
    )
    assert code == 0
    assert "tfparallel launch: restarting all workers (1 of 2)\n" in errors
    assert "(2 of 2)" not in errors
    assert shown.count("attempt 0") == shown.count("attempt 1") == 2
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert set(logs) == {
        f"worker_{worker}{suffix}.log" for worker in (0, 1) for suffix in ("", ".restart_1")
    }
    assert logs["worker_1.log"].startswith("attempt 0 ")
    assert logs["worker_1.restart_1.log"].startswith("attempt 1 ")
    # New ports: the old ones may still be held by what is dying.
    clusters = {log.partition('"task"')[0].partition("{")[2] for log in logs.values()}
    assert len(clusters) == 2


@pytest.mark.slow
def test_restarts_end():
    code, _, errors = launch(["--max_restarts=2"], "raise SystemExit(7)")
    assert code == 7 and errors.count("exited with code 7") == 3
    # Workers that fail at once again are given a moment.
    assert "restarting all workers (1 of 2)" in errors
    assert "restarting all workers in 1 s (2 of 2)" in errors


def test_a_signal_between_two_restarts_keeps_what_is_saved():
    """Story: the code was 138 then, by which the scheduler's script starts no job again."""
    process = start(["--max_restarts=3"], "raise SystemExit(75)")
    for line in process.stderr:
        if "restarting all workers in" in line:
            time.sleep(0.2)
            process.send_signal(signal.SIGUSR1)
            break
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75


SURROGATE = """
import os, sys, tfparallel
if os.environ["TFPARALLEL_RESTART_COUNT"] == "0":
    os.write(2, open(sys.argv[1], "rb").read())
    raise ValueError("no file \\udc80")
print("well")
"""


def test_whatever_a_worker_says_the_launcher_restarts_it(tmp_path):
    (tmp_path / "lines").write_bytes(b"".join(strange_lines(10_000)))
    done = subprocess.run(
        command(["--max_restarts=1"], SURROGATE, tmp_path / "lines"),
        cwd=ROOT, capture_output=True, timeout=DEADLINE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == b"[0] well\n", done.stderr[-2000:]
    assert b"[0] ValueError: no file \\udc80\n" in done.stderr


# A launcher that writes how many kB of memory it took at most into the file that is named first.
WEIGHED = """
import re, sys
from tfparallel.commands.main import main
code = main(["launch", "--", *sys.argv[2:]])
with open("/proc/self/status") as status, open(sys.argv[1], "w") as file:
    file.write(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1])
sys.exit(code)
"""
# A worker that writes a beginning and so many MiB, of which no line ends.
ENDLESS = """
import sys
sys.stderr.buffer.write(sys.argv[1].encode())
for _ in range(int(sys.argv[2])):
    sys.stderr.buffer.write(b"x" * (1 << 20))
"""


def peak_bytes(folder, begin, num_mib):
    """How much memory a launcher took at most, all of whose worker's output is on the screen."""
    arguments = [folder / "peak", sys.executable, "-c", ENDLESS, begin, num_mib]
    with open(folder / "screen", "wb") as screen:
        code = subprocess.run(
            [sys.executable, "-c", WEIGHED, *map(str, arguments)],
            cwd=ROOT, stderr=screen, timeout=DEADLINE_SECONDS,
        ).returncode  # fmt: skip
    first_line = f"[0] {begin}".encode()
    assert code == 0 and (folder / "screen").read_bytes()[: len(first_line)] == first_line
    written = len(first_line) + (num_mib << 20)
    assert 0 <= os.path.getsize(folder / "screen") - written <= 1  # It may end the last line.
    return 1024 * int((folder / "peak").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["\x1e", f"{MARK.decode()}{{"])
def test_a_line_without_end_costs_little_memory(tmp_path, begin):
    """Story: 16 MiB of it took 49 s."""
    assert peak_bytes(tmp_path, begin, 48) - peak_bytes(tmp_path, begin, 0) < 64 << 20


def test_a_full_folder_of_logs_does_not_end_the_job(tmp_path):
    (tmp_path / "worker_0.log").symlink_to("/dev/full")
    code, shown, errors = launch([f"--log_dir={tmp_path}"], "print('a'); print('b')")
    assert (code, shown) == (0, "[0] a\n[0] b\n")
    assert errors == (
        f"tfparallel launch: the logs in --log_dir={tmp_path} are incomplete (No space left "
        "on device)\n"
    )


def test_a_log_is_what_the_worker_wrote(tmp_path):
    code = "import os; os.write(1, bytes(range(256)) * 100); os.write(2, b'no end')"
    done = subprocess.run(
        command([f"--log_dir={tmp_path}"], code),
        cwd=ROOT, capture_output=True, timeout=DEADLINE_SECONDS,
    )  # fmt: skip
    # What follows on a terminal starts in a line of its own.
    assert (done.returncode, done.stderr) == (0, b"[0] no end\n")
    log = (tmp_path / "worker_0.log").read_bytes()
    assert log.replace(b"no end", b"") == bytes(range(256)) * 100 and b"no end" in log


@pytest.mark.parametrize(
    "name, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)]
)
def test_a_signal_stops_all(tmp_path, name, code):
    """The workers are told by the same signal, and killed when they ignore it."""
    flags = ["--nproc_per_node=2", "--grace_seconds=0.3"]
    process = start(flags, STUBBORN_FAMILY, tmp_path)
    processes = family(tmp_path, 6)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code
    assert errors.endswith(f"tfparallel launch: stopped by {name}\n")
    assert survivors(processes) == []


def test_workers_see_the_signal_and_may_finish():
    """Ctrl-C reaches the terminal's whole process group; what the workers get is up to us."""
    polite = (
        "import time\n"
        "try: print('ready'); time.sleep(600)\n"
        "except KeyboardInterrupt: time.sleep(0.2); print('saved')"
    )
    process = start(["--grace_seconds=30"], polite, process_group=0)
    assert process.stdout.readline() == "[0] ready\n"
    os.killpg(process.pid, signal.SIGINT)
    shown, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130 and shown == "[0] saved\n"


SAVES = """
import os, signal, sys, time
def save(*_):
    for number in signal.SIGTERM, signal.SIGUSR1: signal.signal(number, signal.SIG_IGN)
    os.write(1, b"saving\\n"); time.sleep(1); os.write(1, b"saved\\n"); os._exit(75)
signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGUSR1, save)
print("ready", flush=True); time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "later, code",
    [(["SIGTERM", "SIGUSR1", "SIGHUP", "SIGTERM"], 75), (["SIGUSR1", "SIGINT"], 130)],
)
def test_only_ctrl_c_shortens_the_grace(later, code):
    """Story: a second SIGTERM of the scheduler's killed workers that were saving their state."""
    process = start(["--grace_seconds=60"], SAVES)
    assert process.stdout.readline() == "[0] ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "[0] saving\n"
    for name in later:
        process.send_signal(getattr(signal, name))
        time.sleep(0.05)
    shown, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, shown) == (code, "[0] saved\n" * (code == 75)), errors


def test_a_killed_launcher_leaves_nothing(tmp_path):
    workers, temporary = tmp_path / "workers", tmp_path / "temporary"
    workers.mkdir(), temporary.mkdir()
    flags, environment = ["--nproc_per_node=2"], os.environ | {"TMPDIR": str(temporary)}
    process = start(flags, STUBBORN_FAMILY, workers, env=environment)
    processes = family(workers, 6) + psutil.Process(process.pid).children(recursive=True)
    # With two reapers each, and the process that removes the folder of flight records.
    assert len(set(processes)) == 11 and len(os.listdir(temporary)) == 1
    process.kill()
    process.communicate(timeout=DEADLINE_SECONDS)
    wait_for(lambda: survivors(processes) == [], "all processes to end")
    assert os.listdir(temporary) == []


@pytest.mark.parametrize(
    "after_seconds",
    [0.05, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.1, 0.15, 0.3)), 0.2],
)
def test_a_launcher_killed_while_it_starts_leaves_nothing(tmp_path, after_seconds):
    mark = str(tmp_path)
    process = start(["--nproc_per_node=4"], "import time; time.sleep(600)", mark)
    time.sleep(after_seconds)
    process.kill()
    process.communicate(timeout=DEADLINE_SECONDS)

    def marked():
        return [candidate for candidate in psutil.process_iter(["cmdline"])
                if mark in (candidate.info["cmdline"] or ())]  # fmt: skip

    wait_for(lambda: survivors(marked()) == [], "all processes to end")


def test_nobody_reads_on():
    """As in `tfparallel launch ... | head -1`."""
    process = start([], "while True: print('line')")
    assert process.stdout.readline() == "[0] line\n"
    process.stdout.close()
    assert process.wait(DEADLINE_SECONDS) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_an_error(unbuffered):
    code = "print('x', flush=True); import time; time.sleep(600)"
    message = told_of_a_full_disk(command(["--grace_seconds=0.1"], code), unbuffered)
    assert message == "tfparallel launch: [Errno 28] No space left on device\n"


def test_help_on_a_full_disk_is_an_error():
    message = told_of_a_full_disk([sys.executable, "-m", "tfparallel", "launch", "--help"], "")
    assert message.startswith("tfparallel launch: the output is incomplete: [Errno 28]")
    assert message.count("\n") == 1


def told_of_a_full_disk(arguments, unbuffered):
    if not os.path.exists("/dev/full"):
        pytest.skip("the system has no /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            arguments,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
    assert done.returncode == 1
    return done.stderr


def nodes(endpoint, rank, *more):
    return ["--nnodes=2", f"--node_rank={rank}", f"--rdzv_endpoint={endpoint}", *more]


@pytest.fixture
def endpoint():
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


def test_two_nodes_make_one_job(endpoint):
    """The second has two workers, and starts first."""
    second = start(nodes(endpoint, 1, "--nproc_per_node=2"), TELL)
    first = start(nodes(endpoint, 0), TELL)
    shown = {}
    for process in (first, second):
        out, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert (process.returncode, errors) == (0, "")
        shown |= printed_by_worker(out)
    assert sorted(shown) == [0, 1, 2]
    clusters = [json.loads(worker["TF_CONFIG"])["cluster"] for worker in shown.values()]
    assert clusters[0] == clusters[1] == clusters[2] and len(set(clusters[0]["worker"])) == 3
    assert [shown[index]["GROUP_RANK"] for index in range(3)] == ["0", "1", "1"]
    assert [shown[index]["LOCAL_RANK"] for index in range(3)] == ["0", "0", "1"]
    assert {worker["WORLD_SIZE"] for worker in shown.values()} == {"3"}
    for name in ("TFPARALLEL_JOB_TOKEN", "MASTER_ADDR", "MASTER_PORT"):
        assert len({worker[name] for worker in shown.values()}) == 1
    assert shown[0]["TFPARALLEL_JOB_TOKEN"] != os.environ["TFPARALLEL_JOB_TOKEN"]


@pytest.mark.parametrize(("token", "received"), [("", "none"), ("a-short-one", "11 characters")])
def test_several_hosts_need_a_secret_and_are_given_the_line(capsys, monkeypatch, token, received):
    monkeypatch.setenv("TFPARALLEL_JOB_TOKEN", token)
    assert main(["launch", *nodes("h:1", 0), "--", "true"]) == 2
    shown = capsys.readouterr().err
    assert f"Received: {received} in TFPARALLEL_JOB_TOKEN." in shown
    assert "`export TFPARALLEL_JOB_TOKEN=$(openssl rand -hex 16)`, and copy its value" in shown
    # What an error prints ends in logs, and is no secret.
    assert not re.search(r"[0-9a-f]{32}", shown)


@pytest.mark.slow
def test_jobs_of_other_names_do_not_meet(endpoint):
    first = start(nodes(endpoint, 0, "--start_timeout=3", "--job_name=one"), TELL)
    code, _, errors = launch(nodes(endpoint, 1, "--start_timeout=1", "--job_name=other"), TELL)
    assert code == 1
    assert "the launcher there belongs to job 'one', and this one to job 'other'" in errors
    _, errors = first.communicate(timeout=DEADLINE_SECONDS)
    assert first.returncode == 1 and "belongs to job 'other'" in errors


def test_a_node_is_reached_where_it_says(endpoint):
    first = start(nodes(endpoint, 0), TELL)
    code, shown, errors = launch(nodes(endpoint, 1, "--local_addr=localhost"), TELL)
    assert (code, errors) == (0, "")
    (worker,) = printed_by_worker(shown).values()
    hosts = [a.rpartition(":")[0] for a in json.loads(worker["TF_CONFIG"])["cluster"]["worker"]]
    assert hosts == ["127.0.0.1", "localhost"]
    assert first.wait(DEADLINE_SECONDS) == 0


@pytest.mark.slow
def test_two_nodes_restart(endpoint):
    """A worker of one host fails, all launchers restart, and they meet again."""
    code = (
        "import os, time\n"
        "if os.environ['TFPARALLEL_RESTART_COUNT'] == '0':\n"
        "    time.sleep(600 * (os.environ['RANK'] == '0')); raise SystemExit(4)\n" + TELL
    )
    processes = [start(nodes(endpoint, rank, "--max_restarts=1"), code) for rank in (0, 1)]
    shown = {}
    for process in processes:
        out, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 0 and "restarting all workers (1 of 1)" in errors
        shown |= printed_by_worker(out)
    clusters = [json.loads(shown[rank]["TF_CONFIG"])["cluster"] for rank in (0, 1)]
    assert clusters[0] == clusters[1]
    assert [shown[rank]["TFPARALLEL_RESTART_COUNT"] for rank in (0, 1)] == ["1", "1"]


def wait_until_it_listens(endpoint):
    host, _, port = endpoint.rpartition(":")

    def listens():
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    wait_for(listens, "node 0 to listen")


def ends(processes):
    """How launchers ended: their exit codes, and what they said."""
    said = [process.communicate(timeout=DEADLINE_SECONDS)[1] for process in processes]
    return [process.returncode for process in processes], said


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_failure_on_one_node_ends_all(endpoint, culprit):
    """The others would wait for it: for ever under NCCL, and here as well."""
    code = (
        f"import os, signal, time\nif os.environ['RANK'] == '{culprit}':\n"
        "    time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    )
    processes = [start([*nodes(endpoint, rank), "--nnodes=3"], code) for rank in range(3)]
    codes, said = ends(processes)
    assert codes == [137, 137, 137]
    for rank in range(3):
        where = "" if rank == culprit else f" of node {culprit}"
        assert f"launch: worker {culprit}{where} was killed by SIGKILL after " in said[rank]
        assert (f"stopped worker {rank}\n" in said[rank]) == (rank != culprit)


@pytest.mark.slow
def test_a_job_has_succeeded_once_it_has_on_every_node(endpoint):
    """A launcher whose workers are done waits: it is needed if the others must restart."""
    code = (
        "import os, time\n"
        "time.sleep(os.environ['RANK'] == '1')\n"
        "if os.environ['TFPARALLEL_RESTART_COUNT'] + os.environ['RANK'] == '01':\n"
        "    raise SystemExit(4)\n"
    )
    processes = [start(nodes(endpoint, rank, "--max_restarts=1"), code) for rank in (0, 1)]
    codes, said = ends(processes)
    assert codes == [0, 0]
    assert said[0].startswith("tfparallel launch: worker 1 of node 1 exited with code 4 after 1.")
    assert said[0].endswith(
        "; its output is on that host\ntfparallel launch: restarting all workers (1 of 1)\n"
    )


@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "signum, code, how",
    [(signal.SIGTERM, 143, "was stopped by SIGTERM"), (signal.SIGKILL, 1, "is lost: it failed")],
)
def test_a_launcher_that_leaves_ends_the_job(endpoint, leaver, signum, code, how):
    waiting = "import time; print('ready'); time.sleep(600)"
    processes = [start(nodes(endpoint, rank, "--max_restarts=3"), waiting) for rank in (0, 1)]
    assert [process.stdout.readline() for process in processes] == ["[0] ready\n", "[1] ready\n"]
    processes[leaver].send_signal(signum)
    codes, said = ends(processes)
    assert codes[leaver] == {143: 143, 1: -signal.SIGKILL}[code] and codes[1 - leaver] == code
    assert said[1 - leaver].startswith(f"tfparallel launch: the launcher of node {leaver} {how}")
    assert said[1 - leaver].endswith(f"stopped worker {1 - leaver}\n")


def test_workers_that_saved_because_another_node_is_stopped_say_so(endpoint):
    """Story: Kubernetes evicts one pod of a Job; code 143 of the others counted as a failure."""
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    processes = [start(nodes(endpoint, rank), code) for rank in (0, 1)]
    assert [process.stdout.readline() for process in processes] == ["[0] ready\n", "[1] ready\n"]
    processes[1].send_signal(signal.SIGTERM)
    codes, said = ends(processes)
    assert codes == [75, 75]
    assert said[0].startswith("tfparallel launch: the launcher of node 1 was stopped by SIGTERM")


STOP_TOGETHER = """
import os, pathlib, sys, time, signal
stopping = pathlib.Path(sys.argv[1])

def save(*_):
    stopping.touch()
    time.sleep(1)
    sys.exit(75)

signal.signal(signal.SIGTERM, save if os.environ["RANK"] == "1" else signal.SIG_IGN)
print("ready", flush=True)
while not stopping.exists():
    time.sleep(0.01)
while os.environ["RANK"] == "1":
    time.sleep(1)
sys.exit(75)
"""


def test_a_host_whose_workers_save_before_those_of_the_stopped_one_does_not_restart(
    endpoint, tmp_path
):
    """Story: the workers agree to stop; the other launcher waited for the stopped one, code 1."""
    flags = ["--max_restarts=3", "--start_timeout=5"]
    processes = [
        start(nodes(endpoint, rank, *flags), STOP_TOGETHER, tmp_path / "stopping")
        for rank in (0, 1)
    ]
    assert [process.stdout.readline() for process in processes] == ["[0] ready\n", "[1] ready\n"]
    processes[1].send_signal(signal.SIGTERM)
    codes, said = ends(processes)
    assert codes == [75, 75], said
    assert said[0].startswith("tfparallel launch: the launcher of node 1 was stopped by SIGTERM")


def test_a_signal_while_nodes_meet_again_keeps_what_is_saved(endpoint):
    """Node 1 gives up; node 0, which waits for it, is stopped meanwhile."""
    processes = [
        start(nodes(endpoint, rank, f"--max_restarts={1 - rank}"), "raise SystemExit(75)")
        for rank in (0, 1)
    ]
    assert processes[1].wait(DEADLINE_SECONDS) == 75
    for line in processes[0].stderr:
        if "restarting all workers" in line:
            break
    wait_until_it_listens(endpoint)
    processes[0].send_signal(signal.SIGTERM)
    codes, said = ends(processes)
    assert codes == [75, 75], said


@pytest.mark.slow
def test_a_missing_node_is_named(endpoint):
    code, _, errors = launch(nodes(endpoint, 0, "--start_timeout=0.5"), TELL)
    assert code == 1
    assert errors.startswith(
        f"tfparallel launch: node 1 did not connect to {endpoint} within 0.5 s; all 2 nodes"
    )
    code, _, errors = launch(nodes(endpoint, 1, "--start_timeout=0.5"), TELL)
    assert code == 1 and "Node 1 waited 0.5 s for node 0's launcher" in errors


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_nodes_are_missing(endpoint, signum):
    process = start(nodes(endpoint, 0), TELL)
    wait_until_it_listens(endpoint)
    process.send_signal(signum)
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signum


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--nproc_per_node=0", "--", "true"], "must be at least 1. Received: --nproc_per_node=0"),
        (["--nproc_per_node=2"], "A command is required after `--`. Received: none. Example: "),
        (["--"], "A command is required"),
        (["true"], "must follow `--`. Received: ['true'] before it"),
        (["--", "no-such-program"], "does not exist. Received: 'no-such-program'"),
        (["--", __file__], f"must be executable. Received: {__file__!r}. Use `-- python "),
        (["--nproc=2", "--", "true"], "nproc"),
        (["--nnodes=0", "--", "true"], "at least 1 host is required. Received: '0'"),
        (["--nnodes=two", "--", "true"], "--nnodes: a number is required. Received: 'two'"),
        (["--nnodes=1:2", "--num_ps=1", "--", "true"], "Drop --nnodes"),
        (["--job_name=a b", "--", "true"], "Received: --job_name=a b"),
        (["--nnodes=2", "--", "true"], "need --node_rank and --rdzv_endpoint"),
        (["--nnodes=2", "--node_rank=1", "--", "true"], "--rdzv_endpoint=None"),
        (["--node_rank=0", "--", "true"], "needs --nnodes and --rdzv_endpoint"),
        (["--node_rank=1", "--", "true"], "less than --nnodes"),
        (nodes("h:1", 2) + ["--", "true"], "0 to 1. Received: --node_rank=2, --nnodes=2"),
        (nodes("h:1", -1) + ["--", "true"], "Received: --node_rank=-1"),
        (nodes("h", 1) + ["--", "true"], "must be host:port"),
        (["--max_restarts=-1", "--", "true"], "Received: --max_restarts=-1"),
        (["--grace_seconds=nan", "--", "true"], "Received: --grace_seconds=nan"),
        (["--start_timeout=0", "--", "true"], "Received: --start_timeout=0"),
        ([f"--log_dir={__file__}/a", "--", "true"], "Not a directory"),
        (["--bind_cores", "--nproc_per_node=5000", "--", "true"], "bind 5000 workers to"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert main(["launch", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("tfparallel launch: ") and message in shown


@pytest.mark.parametrize("flags", [[], ["--rdzv_endpoint=h:1"], ["--emit=slurm"]])
def test_a_number_of_hosts_that_changes_is_refused_and_the_three_ways_are_named(capsys, flags):
    assert main(["launch", "--nnodes=2:4", *flags, "--", "true"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "--nnodes: the number of hosts is fixed: N is required. Received: '2:4'." in shown
    for way in (
        "--on=ray --num_workers=2:4", "--emit=slurm --nnodes=4 --sbatch_args=--nodes=2-4",
        "--emit=jobset --nnodes=4",
    ):  # fmt: skip
        assert f"`launch {way}`" in shown


def test_all_mistakes_are_told_at_once(capsys):
    assert main(["launch", "--nproc_per_node=0", "--max_restarts=-1", "--", "nothing-here"]) == 2
    shown = capsys.readouterr().err
    assert all(name in shown for name in ("nproc_per_node=0", "max_restarts=-1", "nothing-here"))


def test_a_file_that_lacks_the_permission_to_run(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\n")
    assert main(["launch", "--", str(script)]) == 2
    assert "Use `chmod +x`" in capsys.readouterr().err
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    code = subprocess.run(
        [sys.executable, "-m", "tfparallel", "launch", "--", str(script)], cwd=ROOT, timeout=60
    ).returncode
    assert code == 0


def test_help(capsys):
    assert main(["launch", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  tfparallel launch --nproc_per_node=2 -- " in shown and "--rdzv_endpoint" in shown


def test_flags_behind_the_separator_are_the_commands():
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--help", "--", "--nnodes=0"]
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel", "launch", "--", *show],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS,
    )  # fmt: skip
    assert done.stdout == "[0] ['--help', '--', '--nnodes=0']\n"


def test_it_loads_nothing_heavy():
    program = (
        "import sys; from tfparallel.commands.main import main\n"
        f"main(['launch', '--', {sys.executable!r}, '-c', ''])\n"
        "print([name for name in ('tensorflow', 'keras', 'numpy', 'packaging')"
        " if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_worker_for_each_core():
    code, shown, errors = launch(["--nproc-per-node=cpu"], "print('here')")
    assert code == 0, errors
    assert shown.count("here") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("gpu", "Received: --nproc_per_node=gpu, and this host has no GPU"),
        ("two", "must be a number, gpu, cpu or auto. Received: --nproc_per_node=two."),
    ],
)
def test_words_that_cannot_be(word, message):
    code, _, errors = launch([f"--nproc_per_node={word}"], "pass", CUDA_VISIBLE_DEVICES="-1")
    assert code == 2 and message in errors
