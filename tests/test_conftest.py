"""The guard that keeps tests off the network is itself held to what it says."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1", "", None, b"localhost"])
def test_this_machine_is_local(host: object, network_guard: SimpleNamespace) -> None:
    assert network_guard.is_local(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "10.0.0.1", "2001:db8::1", "models.example.org", b"example.com"])
def test_other_machines_are_not_local(host: object, network_guard: SimpleNamespace) -> None:
    assert not network_guard.is_local(host)


def test_connecting_to_another_machine_is_refused_and_noted(network_guard: SimpleNamespace) -> None:
    with pytest.raises(ConnectionRefusedError, match=r"192\.0\.2\.1"):
        network_guard.refuse("socket.connect", (None, ("192.0.2.1", 443)))
    assert network_guard.attempts == ["socket.connect 192.0.2.1"]
    network_guard.attempts.clear()


def test_the_guard_stands_in_front_of_every_name_lookup(network_guard: SimpleNamespace) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.getaddrinfo("host.invalid", 443)
    assert network_guard.attempts == ["socket.getaddrinfo host.invalid"]
    network_guard.attempts.clear()


def test_loopback_connections_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def test_hub_is_offline_and_its_cache_is_not_the_users() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "lowmem_ft-test-hf-" in os.environ["HF_HOME"]
