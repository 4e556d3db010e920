"""A rollout server on Hugging Face transformers: verl's rollout backend ``hf``.

Three parts, as verl's other backends have them (`verl/workers/rollout/replica.py`):

* :class:`HFServer`: a Ray actor that samples. One background task takes waiting requests in batches,
  one thread runs them. Aborting (for a weight update) stops the running batch between two tokens and
  hands back what was sampled, so that the client can resume it under the new weights; requests that
  have no token yet stay in the queue.
* :class:`HFReplica`: what verl launches.
* :class:`HFServerAdapter`: lives beside the checkpoint engine and hands new weights to the server.

Keys of ``actor_rollout_ref.rollout`` that it reads: ``dtype`` (``float32`` or ``bfloat16``), ``seed``,
``max_num_seqs`` (largest batch), ``response_length``, ``prompt_length``, ``max_model_len``,
``ignore_eos``, ``logprobs_mode``, ``enable_rollout_routing_replay`` (records the experts of every
token) and, under ``custom``, ``gather_window_s`` and ``token_delay_s`` (see `rollout_settings.py`). No
prefix cache is kept between batches, so new weights never meet old keys and values.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.single_controller.ray import RayClassWithInitArgs
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from verl_sat.embedded.rollout_settings import check_rollout_config
from verl_sat.embedded.sampling import Completion, Request, SamplingSettings, request_seed, sample_batch
from verl_sat.router_replay.hook import RouterHook
from verl_sat.router_replay.layout import MoELayout

logger = logging.getLogger(__name__)


def server_name(replica_rank: int) -> str:
    """Ray name of a replica's server."""
    return f"hf_server_{replica_rank}"


def fuse_expert_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack per-expert weights into the packed tensors of transformers 5.

    verl's FSDP engine sends ``experts.<i>.{gate,up,down}_proj.weight``
    (`verl/workers/engine/fsdp/utils.py`, the names that vLLM loads); transformers 5 holds
    ``experts.gate_up_proj`` ``[experts, 2 * intermediate, hidden]`` and ``experts.down_proj``.
    """
    fused: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in weights.items():
        base, found, rest = name.partition(".experts.")
        index = rest.split(".")[0]
        if not found or not index.isdigit():
            fused[name] = tensor
            continue
        projection = rest.removeprefix(f"{index}.").removesuffix(".weight")
        experts.setdefault(f"{base}.experts", {}).setdefault(int(index), {})[projection] = tensor
    for base, by_index in experts.items():
        ordered = [by_index[index] for index in sorted(by_index)]
        fused[f"{base}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in ordered])
        fused[f"{base}.down_proj"] = torch.stack([e["down_proj"] for e in ordered])
    return fused


def install_recorder(model: torch.nn.Module) -> RouterHook:
    """Make the routers of a model recordable.

    Raises:
        NotMoEError: ``enable_rollout_routing_replay`` with a model that has no experts.
    """
    layout = MoELayout.from_config(model.config)
    return RouterHook.install(model, num_experts=layout.num_experts, top_k=layout.top_k)


@dataclass
class _Waiting:
    request: Request
    future: asyncio.Future
    wave: int | None = None  # which gathering first saw it
    seeded_for: int | None = -1  # the version that the request's seed was made for

    def answer(self, completion: Completion) -> None:
        if not self.future.done():  # a caller may have gone away
            self.future.set_result(completion)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class HFServer:
    """Samples for one replica. All methods run on one event loop; sampling runs on one thread.

    Args:
        config: verl's ``RolloutConfig``.
        model_path: local path of the model and its tokenizer.
        replica_rank: rank among the replicas; part of the random stream.
    """

    def __init__(self, config: Any, model_path: str, replica_rank: int = 0) -> None:
        self.config = config
        self.settings = check_rollout_config(config)
        self.replica_rank = replica_rank
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, config.dtype), attn_implementation="sdpa"
        ).eval()
        eos = self.model.generation_config.eos_token_id
        eos_ids = {tokenizer.eos_token_id} | set(eos if isinstance(eos, list) else [eos])
        self.eos_token_ids: set[int] = set() if config.ignore_eos else {i for i in eos_ids if i is not None}
        self.hook = install_recorder(self.model) if config.enable_rollout_routing_replay else None
        self.max_model_len = config.max_model_len or (config.prompt_length + config.response_length)

        self.global_steps: int | None = None  # the weights' version; None until the trainer sent some
        self._queue: deque[_Waiting] = deque()
        self._asked: Counter[tuple[int, ...]] = Counter()  # how often each prompt was asked at this version
        self._wave = 0
        self._arrived = asyncio.Event()
        self._running = asyncio.Event()  # set while the gate is open
        self._running.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._abort = threading.Event()
        self._rejecting = False
        self._last_arrival = 0.0
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-sampling")
        self._loop_task: asyncio.Task | None = None
        self._broken: RuntimeError | None = None

    async def ready(self) -> str:
        """Start the sampling loop; returns the id under which the load balancer knows this server."""
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._sampling_loop())
            self._loop_task.add_done_callback(self._on_loop_end)
        return server_name(self.replica_rank)

    # ---- generation

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **multimodal: Any,
    ) -> TokenOutput:
        """Continue a prompt (`verl/workers/rollout/llm_server.py` calls this).

        Returns:
            TokenOutput with ``stop_reason`` ``completed`` or ``aborted`` and ``extra_fields.global_steps``,
            the version of the weights that sampled every token of it.

        Raises:
            ValueError: for images, video or audio, an unknown sampling parameter or a prompt that leaves
                no room to answer.
        """
        if image_data or video_data or any(value for value in multimodal.values()):
            raise ValueError("the hf rollout is for text; use vLLM or SGLang for multimodal prompts")
        if self._broken is not None:
            raise self._broken
        if self._rejecting:
            return self._output(Completion(aborted=True), wants_log_probs=True)
        prompt_ids = [int(token) for token in prompt_ids]
        settings = SamplingSettings.from_verl(sampling_params, self.config.logprobs_mode == "raw_logprobs")
        limit = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
        limit = self.config.response_length if limit is None else int(limit)
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room to answer within {self.max_model_len}; "
                "raise actor_rollout_ref.rollout.max_model_len"
            )
        request = Request(prompt_ids=prompt_ids, budget=max(1, min(limit, room)), settings=settings)
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._last_arrival = time.monotonic()
        self._arrived.set()
        completion: Completion = await waiting.future
        return self._output(completion, wants_log_probs=bool(sampling_params.get("logprobs", False)))

    def _output(self, completion: Completion, wants_log_probs: bool) -> TokenOutput:
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs if wants_log_probs else None,
            routed_experts=self._all_layers(completion.routed_experts),
            stop_reason="aborted" if completion.aborted else "completed",
            extra_fields={"global_steps": self.global_steps},
        )

    def _all_layers(self, routes: np.ndarray | None) -> np.ndarray | None:
        """With a column for every layer, as the engines on a GPU return them; layers without experts hold zeros."""
        if routes is None or len(self.hook.layers) == self.model.config.num_hidden_layers:
            return routes
        full = np.zeros((len(routes), self.model.config.num_hidden_layers, routes.shape[-1]), routes.dtype)
        full[:, list(self.hook.layers)] = routes
        return full

    def _on_loop_end(self, task: asyncio.Task) -> None:
        """Nobody may wait for a loop that is gone."""
        error = None if task.cancelled() else task.exception()
        self._broken = RuntimeError(f"the sampling loop of {server_name(self.replica_rank)} ended: {error!r}")
        while self._queue:
            self._queue.popleft().fail(self._broken)

    async def _sampling_loop(self) -> None:
        while True:
            await self._arrived.wait()
            await self._running.wait()
            if not self._running.is_set():  # opened and closed again before this task got its turn
                continue
            quiet = time.monotonic() - self._last_arrival
            if quiet < self.settings.gather_window_s:
                await asyncio.sleep(self.settings.gather_window_s - quiet)
                continue
            batch = self._take_batch()
            if not batch:
                self._arrived.clear()
                continue
            self._idle.clear()
            try:
                await self._run(batch)
            finally:
                self._idle.set()

    def _take_batch(self) -> list[_Waiting]:
        """The first waiting requests that share the first one's settings, up to the batch limit.

        Requests that were gathered together are ordered by seed, not by arrival: which of them share a
        batch, and with it the rounding of its matrix products, then does not depend on the network.
        """
        self._wave += 1
        for waiting in self._queue:
            waiting.wave = self._wave if waiting.wave is None else waiting.wave
            if waiting.seeded_for != self.global_steps:
                prompt = tuple(waiting.request.prompt_ids)
                waiting.request.seed = request_seed(
                    self.config.seed, self.global_steps, prompt, self._asked[prompt], self.replica_rank
                )
                waiting.seeded_for = self.global_steps
                self._asked[prompt] += 1
        ordered = sorted(self._queue, key=lambda waiting: (waiting.wave, waiting.request.seed))
        fitting = [waiting for waiting in ordered if waiting.request.settings == ordered[0].request.settings]
        batch = fitting[: self.config.max_num_seqs]
        taken = {id(waiting) for waiting in batch}
        self._queue = deque(waiting for waiting in ordered if id(waiting) not in taken)
        return batch

    async def _run(self, batch: list[_Waiting]) -> None:
        def sample() -> list[Completion]:
            return sample_batch(
                self.model,
                [waiting.request for waiting in batch],
                pad_token_id=self.pad_token_id,
                eos_token_ids=self.eos_token_ids,
                abort=self._abort,
                before_token=self._be_slow if self.settings.token_delay_s else None,
                hook=self.hook,
            )

        try:
            completions = await asyncio.get_running_loop().run_in_executor(self._executor, sample)
        except Exception as error:  # each caller gets it; the loop goes on for the others
            logger.exception("sampling a batch of %d requests failed", len(batch))
            for waiting in batch:
                waiting.fail(error)
            return
        for waiting, completion in zip(batch, completions, strict=True):
            waiting.answer(completion)

    def _be_slow(self) -> None:
        self._abort.wait(self.settings.token_delay_s)

    # ---- life cycle, in verl's words

    async def abort_all_requests(self, reject_request: bool = False, **_: Any) -> dict[str, int]:
        """Close the gate and stop the running batch between two tokens.

        Requests that wait stay queued until :meth:`resume_generation`; with ``reject_request`` they are
        sent back at once, and so is everything that arrives before the gate opens again.
        """
        self._running.clear()
        self._rejecting = reject_request
        self._abort.set()
        await self._idle.wait()
        rejected = 0
        while reject_request and self._queue:
            self._queue.popleft().answer(Completion(aborted=True))
            rejected += 1
        return {"aborted_count": rejected}

    async def resume_generation(self) -> None:
        """Open the gate again."""
        self._abort.clear()
        self._rejecting = False
        self._running.set()

    async def load_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Take new weights, all of them.

        Args:
            weights: name to tensor, verl's unfused expert names or transformers' packed ones.
            global_steps: the trainer's version of these weights.

        Raises:
            RuntimeError: if a batch is running, or a name or shape does not fit the model.
        """
        if not self._idle.is_set():
            raise RuntimeError("weights arrived while a batch was being sampled; abort_all_requests comes first")
        state = self.model.state_dict()
        tied = set(getattr(self.model, "_tied_weights_keys", None) or [])
        weights = fuse_expert_weights(weights)
        missing, unexpected = set(state) - set(weights) - tied, set(weights) - set(state)
        if missing or unexpected:
            raise RuntimeError(
                f"weight update does not fit the rollout model: missing {sorted(missing)[:3]} ({len(missing)} in all), "
                f"unexpected {sorted(unexpected)[:3]} ({len(unexpected)} in all)"
            )
        with torch.no_grad():
            for name, tensor in weights.items():
                if state[name].shape != tensor.shape:
                    raise RuntimeError(f"{name}: shape {tuple(tensor.shape)}, model has {tuple(state[name].shape)}")
                state[name].copy_(tensor)
        self.global_steps = global_steps
        self._asked.clear()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing to load: weights stay in memory."""

    async def sleep(self) -> None:
        """Nothing to free: weights stay in memory."""

    async def clear_kv_cache(self) -> None:
        """No cache outlives a batch."""

    async def release_kv_cache(self) -> None:
        """No cache outlives a batch."""

    async def resume_kv_cache(self) -> None:
        """No cache outlives a batch."""

    async def start_profile(self, **_: Any) -> None:
        """No profiler here."""

    async def stop_profile(self) -> None:
        """No profiler here."""


class HFServerAdapter:
    """Hands weights from the checkpoint engine to the replica's server (`CheckpointEngineWorker.server_adapter`)."""

    is_leader_rank = True

    def __init__(self, replica_rank: int) -> None:
        self.replica_rank = replica_rank

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, torch.Tensor]] | Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **_: Any,
    ) -> None:
        """Collect one whole update and load it; the model is small, the update is one Ray object.

        Raises:
            NotImplementedError: for a delta format.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(f"the hf rollout takes whole tensors, not {wire_format!r}")
        collected: dict[str, torch.Tensor] = {}
        if hasattr(weights, "__aiter__"):
            async for name, tensor in weights:
                collected[name] = tensor
        else:
            collected.update(weights)
        server = ray.get_actor(server_name(self.replica_rank))
        await server.load_weights.remote(collected, global_steps)


class HFReplica(RolloutReplica):
    """One server process on one CPU slot, separate from the trainer (standalone mode only)."""

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """The checkpoint-engine worker of this replica, with our adapter in it."""
        from verl.checkpoint_engine.base import CheckpointEngineWorker

        return RayClassWithInitArgs(
            cls=ray.remote(CheckpointEngineWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            server_adapter=HFServerAdapter(self.replica_rank),
        )

    async def launch_servers(self) -> None:
        """Start the server actor.

        Raises:
            ValueError: in hybrid mode, or for a replica of more than one worker.
        """
        if self.rollout_mode is None or self.rollout_mode.value != "standalone":
            raise ValueError(
                "the hf rollout runs beside the trainer, not inside it; set actor_rollout_ref.hybrid_engine=False "
                "and trainer.v1.trainer_mode=separate_async"
            )
        if self.world_size != 1:
            raise ValueError(
                f"a replica of {self.world_size} workers; set actor_rollout_ref.rollout.tensor_model_parallel_size=1 "
                "(and data and pipeline parallel sizes): the hf rollout does not split a model"
            )
        model_config = omega_conf_to_dataclass(self.model_config)
        server = (
            ray.remote(HFServer)
            .options(name=server_name(self.replica_rank), max_concurrency=self.max_concurrency)
            .remote(self.config, model_config.local_path, self.replica_rank)
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.ready.remote()
