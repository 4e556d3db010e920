"""Trainer-to-rollout weight transfer over gloo: verl's checkpoint engine ``gloo``.

verl's own engines move weights by NCCL, NIXL or CUDA IPC. This one does the same job between CPU
processes. It is selected by ``rollout.checkpoint_engine.backend=gloo`` and
``rollout.checkpoint_engine.custom_backend_module=verl_sat.embedded.weight_sync``
(`verl/checkpoint_engine/base.py`).

Topology: trainer rank 0 broadcasts to every rollout worker. The other trainer ranks only walk the
weight generator, because producing a full tensor of a sharded one is collective among them.

Wire format: buckets of whole tensors. A bucket is a header (pickled list of name, shape, dtype),
preceded by its length, then the bytes of the tensors one after another; a header of length 0 ends the
transfer. A tensor larger than the bucket size travels in a bucket of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.net_utils import get_free_port

_TIMEOUT = timedelta(minutes=10)
_SENDER = 0


@dataclass(frozen=True)
class Endpoint:
    """Where the group of one trainer and its rollout workers meets."""

    host: str
    port: int


def iter_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group named tensors into buckets of at most ``bucket_bytes`` bytes (one tensor at least)."""
    bucket: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for name, tensor in weights:
        if bucket and filled + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor.detach().cpu().contiguous()))
        filled += tensor.nbytes
    if bucket:
        yield bucket


def pack(bucket: list[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Header and payload of a bucket, both 1-D uint8."""
    header = pickle.dumps([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in bucket])
    payload = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
    return torch.frombuffer(bytearray(header), dtype=torch.uint8), payload


def unpack(header: torch.Tensor, payload: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The bucket that :func:`pack` made; tensors are views of ``payload``."""
    bucket, offset = [], 0
    for name, shape, dtype in parse_header(header):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        # clone: a view at an odd byte offset cannot be reinterpreted as a wider dtype
        bucket.append((name, payload[offset : offset + nbytes].clone().view(dtype).view(shape)))
        offset += nbytes
    return bucket


def parse_header(header: torch.Tensor) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of each tensor of a bucket."""
    return pickle.loads(bytes(header.tolist()))


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """verl's checkpoint-engine interface over a gloo broadcast.

    Args:
        bucket_size: bytes moved at once.
        is_master: whether this process is trainer rank 0.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **kwargs: Any) -> None:
        if kwargs:
            raise ValueError(
                f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gloo: unknown keys {sorted(kwargs)}; "
                "the gloo engine takes none"
            )
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank: int | None = None
        self.world_size: int | None = None
        self._group: dist.ProcessGroup | None = None
        self._endpoint: Endpoint | None = None

    def prepare(self) -> Endpoint | None:
        """The meeting point, from trainer rank 0; it stays the same as long as the group does."""
        if not self.is_master:
            return None
        if self._endpoint is None:
            host = ray.util.get_node_ip_address().strip("[]")
            port, _ = get_free_port(host)
            self._endpoint = Endpoint(host, port)
        return self._endpoint

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Endpoint | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Trainer rank 0 is the sender, rollout workers are ranks 1 and up, other trainer ranks are -1."""
        endpoint = metadata[0]
        world_size = rollout_world_size + 1
        trainer = {
            "rank": [_SENDER] + [-1] * (actor_wg_world_size - 1),
            "world_size": [world_size] * actor_wg_world_size,
            "endpoint": [endpoint] * actor_wg_world_size,
        }
        rollout = {
            "rank": list(range(1, world_size)),
            "world_size": [world_size] * rollout_world_size,
            "endpoint": [endpoint] * rollout_world_size,
        }
        return trainer, rollout

    def init_process_group(self, rank: int, world_size: int, endpoint: Endpoint) -> None:
        """Join the group, or keep it where nothing changed since the last update."""
        if rank < 0:
            self.rank = rank
            return
        if self._group is not None:
            if (rank, world_size, endpoint) != (self.rank, self.world_size, self._endpoint):
                raise RuntimeError(
                    f"the gloo weight group was rank {self.rank} of {self.world_size} and is asked to become "
                    f"{rank} of {world_size}; changing the number of rollout workers in a run is not supported"
                )
            return
        store = dist.TCPStore(endpoint.host, endpoint.port, world_size, is_master=rank == _SENDER, timeout=_TIMEOUT)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, _TIMEOUT)
        self.rank, self.world_size, self._endpoint = rank, world_size, endpoint

    def finalize(self) -> None:
        """Nothing to free: the group is kept for the next update."""

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "init_process_group comes before a transfer"
        self._group.broadcast(tensor, _SENDER).wait()
        return tensor

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Broadcast every weight; see the module's wire format."""
        if self.rank is not None and self.rank < 0:
            for _ in weights:
                pass
            return {}
        for bucket in iter_buckets(weights, self.bucket_size):
            header, payload = pack(bucket)
            self._broadcast(torch.tensor([header.numel()], dtype=torch.int64))
            self._broadcast(header)
            self._broadcast(payload)
        self._broadcast(torch.zeros(1, dtype=torch.int64))
        return {}

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the weights that trainer rank 0 sends."""
        while True:
            length = int(self._broadcast(torch.zeros(1, dtype=torch.int64))[0])
            if length == 0:
                return
            header = self._broadcast(torch.zeros(length, dtype=torch.uint8))
            nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in parse_header(header))
            payload = self._broadcast(torch.zeros(nbytes, dtype=torch.uint8))
            for named_tensor in unpack(header, payload):
                yield named_tensor
