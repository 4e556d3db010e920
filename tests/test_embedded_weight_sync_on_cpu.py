"""Weight transfer over gloo: buckets, and real processes."""

import asyncio
import multiprocessing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_sat.embedded.weight_sync import Endpoint, GlooCheckpointEngine, iter_buckets, pack, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def weights_of(shapes):
    generator = torch.Generator().manual_seed(0)
    return [
        (f"layer.{i}", (torch.randn(shape, generator=generator) * 5).to(DTYPES[i % len(DTYPES)]))
        for i, shape in enumerate(shapes)
    ]


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8), st.integers(1, 400))
def test_buckets_keep_every_tensor_in_order_and_to_the_bit(shapes, bucket_bytes):
    weights = weights_of(shapes)
    buckets = list(iter_buckets(iter(weights), bucket_bytes))
    received = [item for bucket in buckets for item in unpack(*pack(bucket))]
    assert [name for name, _ in received] == [name for name, _ in weights]
    for (_, sent), (_, got) in zip(weights, received, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape
        assert torch.equal(got, sent)
    for bucket in buckets:
        assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= bucket_bytes


def test_topology_has_one_sender_and_every_rollout_worker():
    endpoint = Endpoint("127.0.0.1", 1)
    trainer, rollout = GlooCheckpointEngine.build_topology(3, 2, [endpoint, None, None, None, None])
    assert trainer["rank"] == [0, -1, -1]
    assert rollout["rank"] == [1, 2]
    assert set(trainer["world_size"] + rollout["world_size"]) == {3}
    assert set(trainer["endpoint"] + rollout["endpoint"]) == {endpoint}


def test_unknown_engine_kwargs_are_refused():
    with pytest.raises(ValueError, match="rebuild_group"):
        GlooCheckpointEngine(bucket_size=1, rebuild_group=True)


def _receive(port, rank, queue):
    engine = GlooCheckpointEngine(bucket_size=64)
    engine.init_process_group(rank, 3, Endpoint("127.0.0.1", port))

    async def collect():
        return [(name, tensor.clone()) async for name, tensor in engine.receive_weights()]

    for _ in range(2):
        queue.put((rank, asyncio.run(collect())))


def test_two_receivers_get_two_updates(free_port):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [context.Process(target=_receive, args=(free_port, rank, queue)) for rank in (1, 2)]
    for child in children:
        child.start()
    engine = GlooCheckpointEngine(bucket_size=64, is_master=True)
    engine.init_process_group(0, 3, Endpoint("127.0.0.1", free_port))
    for factor in (1, 2):
        update = [(name, tensor * factor) for name, tensor in weights_of([[3, 4], [], [2], [40]])]
        asyncio.run(engine.send_weights(iter(update)))
        for _ in range(2):
            _, got = queue.get(timeout=60)
            assert [name for name, _ in got] == [name for name, _ in update]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, update, strict=True))
    with pytest.raises(RuntimeError, match="not supported"):
        engine.init_process_group(0, 4, Endpoint("127.0.0.1", free_port))
    for child in children:
        child.join(timeout=30)
        assert child.exitcode == 0


def test_a_trainer_rank_that_does_not_send_still_walks_the_weights():
    engine = GlooCheckpointEngine(bucket_size=64)
    engine.init_process_group(-1, 3, Endpoint("127.0.0.1", 1))
    seen = []

    def weights():
        for item in weights_of([[2], [3]]):
            seen.append(item[0])
            yield item

    asyncio.run(engine.send_weights(weights()))
    assert seen == ["layer.0", "layer.1"]
