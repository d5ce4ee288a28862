"""A host's share of a job: its workers as programs, each with its place, environment and cores."""

import secrets
from collections.abc import Mapping, Sequence

from tfparallel.cluster.address import split_address
from tfparallel.cluster.environment import (
    Place,
    available_cores,
    core_shares,
    job_environment,
    worker_environment,
)
from tfparallel.cluster.listener import LISTEN_ADDR, everywhere
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.rendezvous import Rendezvous
from tfparallel.cluster.roles import Roles
from tfparallel.cluster.supervisor import Program

__all__ = ["host_programs", "meet_alone", "programs_with_servers"]


def meet_alone(num_workers: int) -> Rendezvous:
    """Returns the meeting of a job that this host runs alone, on free ports of its loopback.

    Call it anew for each attempt: what is dying may still hold the old ports.

    Args:
        num_workers: How many workers the job has.

    Raises:
        RuntimeError: If the host has too few free ports.
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
    """Makes the programs of one host's workers.

    Args:
        meeting: All workers of the job.
        command: What each worker runs.
        inherited: The environment to start from; see `worker_environment`.
        restart_count: How often the job has been restarted.
        bind_cores: Whether each worker has its share of the cores to itself.

    Returns:
        One program for each worker, in the order of their indices.

    Raises:
        ValueError: If there are fewer cores than workers to bind to them.
    """
    num_local_workers = len(meeting.addresses[meeting.node])
    first = sum(len(node) for node in meeting.addresses[: meeting.node])
    cores = [()] * num_local_workers
    if bind_cores:
        cores = core_shares(available_cores(), num_local_workers)
    # Behind a gateway, what the others reach is none of this host's addresses.
    listens_on = everywhere(split_address(meeting.addresses[meeting.node][0])[0])
    if listens_on is not None:
        inherited = {LISTEN_ADDR: listens_on, **inherited}
    programs = []
    for local_rank in range(num_local_workers):
        place = Place(
            addresses=[address for node in meeting.addresses for address in node],
            worker=first + local_rank,
            local_rank=local_rank,
            num_local_workers=num_local_workers,
            node_rank=meeting.node,
            master=meeting.master,
            token=meeting.token,
            restart_count=restart_count,
        )
        environment = worker_environment(inherited, place)
        programs.append(Program(place.worker, command, environment, cores[local_rank]))
    return programs


def programs_with_servers(
    command: Sequence[str],
    inherited: Mapping[str, str],
    *,
    num_workers: int,
    num_servers: int,
    restart_count: int = 0,
) -> list[Program]:
    """Makes the programs of a job with servers of weights, all on this host.

    Args:
        command: What each process runs.
        inherited: The environment to start from; see `worker_environment`.
        num_workers: How many processes compute gradients; the job goes on without all but one.
        num_servers: How many hold the weights.
        restart_count: How often the job has been restarted.

    Returns:
        Those of the workers, of the servers, and of the chief, with whose end the job ends.

    Raises:
        RuntimeError: If the host has too few free ports.
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
