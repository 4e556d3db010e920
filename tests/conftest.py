"""Fixtures of all tests. Nothing here imports verl: some tests start processes that must not have it yet."""

import os
import socket

import pytest

from verl_sat import once


@pytest.fixture(autouse=True)
def nothing_said_yet():
    """Every test hears what a process says once."""
    once.forget()


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


@pytest.fixture(scope="module")
def transfer_queue_service():
    """verl's real data plane, TransferQueue, on a small Ray of its own."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    storage = {"total_storage_size": 1000, "num_data_storage_units": 1}
    tq.init(OmegaConf.create({"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": storage}}))
    yield tq
    tq.close()
    ray.shutdown()


@pytest.fixture
def empty_queue(transfer_queue_service):
    """The data plane, emptied after each test."""
    yield transfer_queue_service
    for partition, items in (transfer_queue_service.kv_list() or {}).items():
        if items:
            transfer_queue_service.kv_clear(partition_id=partition, keys=list(items))
