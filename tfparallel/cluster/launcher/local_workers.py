"""The workers of one host as programs, each with its index, environment and cores."""

import secrets
from collections.abc import Mapping, Sequence

from tfparallel.cluster.address import split_address
from tfparallel.cluster.environment import (
    available_cores,
    core_shares,
    job_environment,
    too_many_workers,
)
from tfparallel.cluster.launcher.supervisor import Program
from tfparallel.cluster.listener import LISTEN_ADDR, everywhere
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.rendezvous import Rendezvous
from tfparallel.cluster.roles import Roles
from tfparallel.cluster.tf_config import write


def meet_alone(num_workers: int) -> Rendezvous:
    """Returns the rendezvous of a single-host job, on free loopback ports.

    Call it again for each attempt: dying processes may still hold the old ports. `RuntimeError` if
    there are too few free ports.
    """
    *ports, master_port = free_ports(num_workers + 1)
    return Rendezvous(
        addresses=[[f"127.0.0.1:{port}" for port in ports]],
        master=f"127.0.0.1:{master_port}",
        token=secrets.token_hex(16),
    )


def host_programs(
    meeting: Rendezvous,
    command: Sequence[str],
    inherited: Mapping[str, str],
    *,
    restart_count: int = 0,
    bind_cores: bool = False,
) -> list[Program]:
    """Returns the programs of one host's workers, in index order."""
    num_local_workers = len(meeting.addresses[meeting.node])
    first = sum(map(len, meeting.addresses[: meeting.node]))
    cores = [()] * num_local_workers
    if bind_cores:
        cores = core_shares(available_cores(), num_local_workers)
    # Behind a gateway, the others' address for this host is not one of its own.
    listens_on = everywhere(split_address(meeting.addresses[meeting.node][0])[0])
    if listens_on is not None:
        inherited = {LISTEN_ADDR: listens_on, **inherited}
    return [
        Program(
            first + local_rank,
            command,
            worker_environment(inherited, meeting, local_rank, restart_count),
            cores[local_rank],
        )
        for local_rank in range(num_local_workers)
    ]


def worker_environment(
    inherited: Mapping[str, str], meeting: Rendezvous, local_rank: int, restart_count: int = 0
) -> dict[str, str]:
    """Returns a worker's environment; `RuntimeError` if TF_CONFIG cannot hold all workers."""
    addresses = [address for node in meeting.addresses for address in node]
    if problem := too_many_workers(addresses):
        raise RuntimeError(problem)
    num_local_workers = len(meeting.addresses[meeting.node])
    worker = sum(map(len, meeting.addresses[: meeting.node])) + local_rank
    master_host, _, master_port = meeting.master.rpartition(":")
    shared = job_environment(inherited, num_local_workers, meeting.token, restart_count)
    return shared | {
        "TF_CONFIG": write({"worker": addresses}, "worker", worker),
        "RANK": str(worker),
        "WORLD_SIZE": str(len(addresses)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(num_local_workers),
        "GROUP_RANK": str(meeting.node),
        "GROUP_WORLD_SIZE": str(len(meeting.addresses)),
        "MASTER_ADDR": master_host.strip("[]"),
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
    }


def programs_with_servers(
    command: Sequence[str],
    inherited: Mapping[str, str],
    *,
    num_workers: int,
    num_servers: int,
    restart_count: int = 0,
) -> list[Program]:
    """Returns the programs of a parameter-server job on this host; the chief comes last.

    The job ends with the chief, and continues while at least one worker remains. `RuntimeError` if
    there are too few free ports.
    """
    chief, *ports = (f"127.0.0.1:{port}" for port in free_ports(1 + num_workers + num_servers))
    workers, servers = tuple(ports[:num_workers]), tuple(ports[num_workers:])
    tasks = [("worker", index) for index in range(num_workers)]
    tasks += [*(("ps", index) for index in range(num_servers)), ("chief", 0)]
    shared = job_environment(inherited, num_workers, secrets.token_hex(16), restart_count)
    programs = []
    for number, (kind, index) in enumerate(tasks):
        roles = Roles(chief, workers, servers, kind, index)
        programs.append(
            Program(
                number,
                command,
                shared | {"TF_CONFIG": roles.to_tf_config()},
                name=kind if kind == "chief" else f"{kind} {index}",
                is_spare=kind == "worker",
                ends_job=kind == "chief",
            )
        )
    return programs
