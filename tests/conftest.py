"""Fixtures of all tests. Nothing here imports verl: some tests start processes that must not have it yet."""

import os
import socket

import pytest

# Two cores and several processes: more threads only wait for each other, and results then depend on them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("RAY_ADDRESS", None)  # never somebody's running cluster


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
