"""Ports that are free, and differ."""

import socket

from tfparallel.cluster.ports import free_ports


def test_ports_differ_and_can_be_bound():
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        # Below the ports of outgoing connections.
        assert 20000 <= port < 32768
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_in_use_is_passed_over(monkeypatch):
    import tfparallel.cluster.ports as module

    taken, free = sorted(free_ports(2))
    monkeypatch.setattr(module, "_RANGE", [taken, free])
    monkeypatch.setattr(module, "_NUM_TRIES", 1)
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports(1) == [free]
        with socket.create_server(("127.0.0.1", free)):
            # None is left there: the system names one.
            (port,) = free_ports(1)
            assert port not in (0, taken, free)



def test_two_launchers_rarely_meet():
    assert free_ports(5) != free_ports(5)
