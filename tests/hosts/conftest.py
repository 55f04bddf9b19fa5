"""Fixtures of this folder; its tests are skipped where there can be no network namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.fixtures import model_dir
from tests.e2e.stack import Row
from tests.hosts.host_stack import BROKER, HUB, HostStack
from tests.hosts.network import Network, missing

__all__ = ["make_hosts", "make_network", "model_dir"]

MakeNetwork = Callable[..., Network]
MakeHosts = Callable[..., HostStack]


@pytest.fixture
def make_network() -> Iterator[MakeNetwork]:
    """Makes networks of named hosts."""
    if reason := missing():
        pytest.skip(reason)
    made: list[Network] = []

    def make(*names: str) -> Network:
        made.append(Network(names))
        return made[-1].open()

    yield make
    for network in made:
        network.close()


@pytest.fixture
def make_hosts(make_network: MakeNetwork, tmp_path: Path, model_dir: Path) -> Iterator[MakeHosts]:
    """Makes runs with a broker, a hub and workers' hosts."""
    made: list[HostStack] = []

    def make(rows: list[Row], *workers: str) -> HostStack:
        made.append(HostStack(tmp_path, make_network(BROKER, HUB, *workers), model_dir, rows))
        return made[-1]

    yield make
    for stack in made:
        stack.close()
