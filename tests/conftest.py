"""What holds for every test: no network, no user's cache, threads that spin little, no GPU test without a GPU."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Before anything imports torch or huggingface_hub, which read these once; the processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="lowmem_ft-test-hf-")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# OpenMP's threads spin while they wait, so two torch processes on the same cores hold each other up. Measured on 2
# cores, torch 2.13.0+cpu, 300 forward and backward passes of 8 small linear layers, alone / two at once: default
# 0.15 s / 9 s, spin count 1000 0.16 s / 0.8 s, one thread 0.20 s / 0.20 s. So the tests keep the threads that users
# have, and spin little.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_attempts: list[str] = []


def is_local(host: object) -> bool:
    """Whether a name or an address is this machine's own."""
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host is None or not isinstance(host, str):
        return host is None
    if host in ("", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: stops what Python does on a socket towards another machine, and notes it.

    Sees the `socket` module and all that is built on it, in this process. For the processes that a test starts there
    are only the offline variables.
    """
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a path: a socket in the file system
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if not is_local(host):
        _attempts.append(f"{event} {host}")
        raise ConnectionRefusedError(f"tests may not reach the network: {event} {host}")


sys.addaudithook(refuse_network)


@pytest.fixture
def network_guard() -> SimpleNamespace:
    """The guard's parts and its notes, for the tests of the guard; a test that means to try empties the notes."""
    return SimpleNamespace(attempts=_attempts, is_local=is_local, refuse=refuse_network)


@pytest.fixture(autouse=True)
def _fail_on_network() -> Iterator[None]:
    """A library may swallow the refused connection, so the test fails afterwards."""
    _attempts.clear()
    yield
    if _attempts:
        pytest.fail("the test tried to reach the network: " + "; ".join(_attempts))


@pytest.fixture(scope="session", autouse=True)
def _constants_are_read() -> None:
    """Before its first draw hypothesis reads the constants of every module here: 1.5 s in a fresh clone, then cached.

    Its check of slow strategies would put that on whichever test draws first (hypothesis 6.170, 2 cores, 2026-11-30).
    """

    @settings(max_examples=1, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.text())
    def draw(_: str) -> None:
        pass

    draw()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
