"""A host that joins and fails again and again leaves the others time to train."""

import threading

import pytest

from tests.cluster.processes import wait_for
from tfparallel.cluster.back_off import BackOff, RestartBackOff
from tfparallel.cluster.elastic import ElasticMeetings
from tfparallel.cluster.ports import free_ports


def test_it_doubles_up_to_a_limit():
    back_off = BackOff(10, 60)
    assert back_off.remaining(now=100.0) == 0
    assert [back_off.failed(3.0, now=100.0) for _ in range(5)] == [10, 20, 40, 60, 60]
    assert back_off.remaining(now=130.0) == 30
    assert back_off.remaining(now=200.0) == 0


def test_a_host_that_took_part_for_long_is_no_reason_to_wait():
    back_off = BackOff(10, 60, soon_seconds=300)
    back_off.failed(3.0, now=0.0)
    assert back_off.failed(301.0, now=500.0) == 0 and back_off.remaining(now=500.0) == 0
    assert back_off.failed(3.0, now=600.0) == 10


def test_restarts_wait_longer_and_longer():
    """Story: 150 restarts were used up in 44 s."""
    back_off = RestartBackOff()
    waits = [back_off.failed(lasted_seconds=0.2) for _ in range(9)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [back_off.failed(90.0), back_off.failed(0.2)] == [0, 1]  # It had worked for a while.


def join(meetings):
    """Meets in a thread; a list that holds what it met, once it has."""
    rounds = []
    ports = free_ports(2)

    def run():
        rounds.append(meetings.meet(ports[:1], ports[1]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, rounds


def listen_until(news, condition):
    def heard():
        for line in news._lines:
            line.listen()
        return condition()

    wait_for(heard, "news")


@pytest.fixture(name="job")
def elastic_job():
    """Makes launchers of one job of 1 to 2 hosts."""
    (port,) = free_ports(1)
    launchers = []

    def make():
        launchers.append(
            ElasticMeetings(
                [f"127.0.0.1:{port}"], min_nodes=1, max_nodes=2, timeout_seconds=30,
                token="a-token", job="a-job", back_off=BackOff(first_seconds=2.0),
            )
        )  # fmt: skip
        return launchers[-1]

    yield make
    for meetings in launchers:
        meetings._close_acceptor()


@pytest.mark.slow
def test_the_next_one_waits_and_then_joins(job, monkeypatch):
    monkeypatch.setattr("tfparallel.cluster.elastic._FIRST_CALL_SECONDS", 0.2)
    first = job()
    ports = free_ports(2)
    meeting = first.meet(ports[:1], ports[1])
    _, joining = join(job())  # It joins,
    wait_for(lambda: meeting.news.lines[-1].listen() and meeting.news.look() == 0.0, "a newcomer")
    assert meeting.news.has_newcomer
    meeting.news.close()
    meeting = first.meet(ports[:1], ports[1])
    assert meeting.news.num_nodes == 2
    wait_for(lambda: joining, "the newcomer's round")
    joining[0].news.__exit__(None, RuntimeError(), None)  # and leaves without a word.
    listen_until(meeting.news, lambda: meeting.news.departure)
    assert first.note_failure(meeting.news.departure.node) == 2.0
    assert first.note_failure(0) == 0.0  # Who was there before makes nobody wait.
    meeting.news.close()

    _, joining = join(job())
    meeting = first.meet(ports[:1], ports[1])
    assert meeting.news.num_nodes == 1
    wait_for(lambda: meeting.news.lines[-1].listen() and first._waiting, "the next newcomer")
    assert 0.0 < meeting.news.look() <= 2.0 and not meeting.news.has_newcomer
    wait_for(lambda: meeting.news.look() == 0.0, "the end of its wait")
    assert meeting.news.has_newcomer
    meeting.news.close()
    meeting = first.meet(ports[:1], ports[1])
    assert meeting.news.num_nodes == 2
    wait_for(lambda: joining, "its round")
    joining[0].news.close()
    meeting.news.close()
