"""Replay of recorded routes in verl's FSDP engine, and the proof that it happened.

verl accepts ``router_replay.mode=R3`` for FSDP and ignores it. Here the routes of a micro-batch, ``routed_experts`` in
the batch, take the way of its tokens: packed or padded as verl's engine packs or pads them, sliced for Ulysses by
verl's own function. The hook (`verl_sat/router_replay/hook.py`) then forces each router's choice, and counts.

The numbers of a mini-batch (:meth:`RouteReplay.metrics`) come from the routers, not from what was asked for: a router
that was never forced does not count as replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, slice_input_tensor

from verl_sat.once import warn_once
from verl_sat.router_replay.client import FLAG_KEY, INFO_FIELD, MODE_KEY, RowInfo, fit_info
from verl_sat.router_replay.hook import ReplayError, RouterHook
from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import Missing

logger = logging.getLogger(__name__)

FIELD = "routed_experts"
REASONS = ("absent", "rejected", "unreached", "lost")


@dataclass(frozen=True)
class Expected:
    """What a mini-batch should replay, from its tokens and from what the rollout said about them (this rank's share).

    Attributes:
        rows: prompt and response tokens that have a record coming: all but each sample's last, without padding samples.
        recorded: of them, the rows that the rollout recorded.
        absent: rows for which the engine returned none.
        rejected: rows of records that were refused.
        nbytes: of the routes of the whole mini-batch.
        tokens: of the whole mini-batch.
    """

    rows: int = 0
    recorded: int = 0
    absent: int = 0
    rejected: int = 0
    nbytes: int = 0
    tokens: int = 0

    def as_sums(self) -> list[float]:
        """For one sum over ranks."""
        return [float(n) for n in (self.rows, self.recorded, self.absent, self.rejected, self.nbytes, self.tokens)]


def jagged(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and offsets of a jagged tensor."""
    return tensor.values(), tensor.offsets()


def rows_expected(micro_batch: TensorDict) -> torch.Tensor:
    """Which packed rows have a record coming: bool ``[tokens]``. No host synchronisation.

    Args:
        micro_batch: with jagged ``input_ids`` and ``response_mask`` (a sample that trains nothing is verl's padding).
    """
    input_ids, offsets = jagged(micro_batch["input_ids"])
    mask = micro_batch["response_mask"]
    if mask.is_nested:
        values, mask_offsets = jagged(mask)
        running = torch.nn.functional.pad(values.ne(0).cumsum(0), (1, 0))
        trains = running[mask_offsets[1:]] > running[mask_offsets[:-1]]
    else:
        trains = mask.ne(0).any(dim=-1)
    rows = torch.repeat_interleave(trains, offsets.diff(), output_size=input_ids.shape[0])
    rows[offsets[1:] - 1] = False
    return rows


def per_sample(data: TensorDict, key: str) -> list[Any]:
    """A field of a batch that is no tensor, an entry per sample.

    It is a stack of per-sample values, each maybe wrapped as non-tensor data, or one value for all.
    """
    values = data[key]
    if isinstance(values, Mapping):
        return [values] * len(data)
    return [getattr(value, "data", value) for value in values]


def described_rows(data: TensorDict) -> list[dict[str, Any] | None]:
    """What the rollout said about the rows of each sample, None where it said nothing.

    V1 trainers carry it in ``extra_fields``; the legacy ones spread those into columns of their own.
    """
    if INFO_FIELD in data.keys():
        described = per_sample(data, INFO_FIELD)
    elif "extra_fields" in data.keys():
        described = [
            row.get(INFO_FIELD) if isinstance(row, Mapping) else None for row in per_sample(data, "extra_fields")
        ]
    else:
        described = [None] * len(data)
    return [row if isinstance(row, Mapping) else None for row in described]


def expected_of(data: TensorDict, layer: int) -> Expected:
    """What a mini-batch should replay; it is on the host still.

    The array decides which rows are there, what the rollout said decides why the others are not.

    Args:
        data: verl's mini-batch of this rank, jagged.
        layer: any layer with experts; a recorded row has a code there.
    """
    lengths = data["input_ids"].offsets().diff().tolist()  # sync ok: host data, once for a mini-batch
    mask = data["response_mask"]
    mask = mask.to_padded_tensor(0) if mask.is_nested else mask
    trains = mask.ne(0).any(dim=-1).tolist()  # sync ok: host data, once for a mini-batch
    routes = data[FIELD]
    rows = recorded = absent = rejected = unannounced = undescribed = 0
    for length, counts, described, sample in zip(lengths, trains, described_rows(data), routes.unbind(), strict=True):
        if not counts:
            continue
        rows += length - 1
        there = sample[: length - 1, layer, 0].ne(0).numpy()
        if described is None:
            undescribed += 1
            recorded += int(there.sum())
            continue
        why = fit_info(RowInfo.parse(described), length - 1).why
        announced = why == Missing.RECORDED
        unannounced += int((there & ~announced).sum())
        recorded += int((there | announced).sum())
        absent += int((~there & (why == Missing.ABSENT)).sum())
        rejected += int((~there & (why == Missing.REJECTED)).sum())
    if undescribed:
        warn_once(
            logger,
            "undescribed",
            "%d of %d samples come without a word on their routes (an agent loop of its own drops extra_fields['%s']): "
            "rows that are missing there count as actor/r3/native/unreached_frac, whatever the reason",
            undescribed,
            len(lengths),
            INFO_FIELD,
        )
    if unannounced:
        warn_once(
            logger,
            "unannounced",
            "%d rows have routes that the rollout did not announce: an agent loop of its own keeps extra_fields['%s'] "
            "of one turn and the routes of another, so earlier turns may be replayed with the routes of newer weights",
            unannounced,
            INFO_FIELD,
        )
    values = routes.values()
    return Expected(rows, recorded, absent, rejected, values.numel() * values.element_size(), sum(lengths))


class RouteReplay:
    """Replays the routes of micro-batches in one actor module.

    Args:
        module: the actor's module, sharded or not.
        hf_config: the model's configuration.

    Raises:
        NotMoEError: the model has no experts.
        UnsupportedRouterError: a router whose choice the hook cannot force, by name.
    """

    def __init__(self, module: torch.nn.Module, hf_config: Any) -> None:
        self.layout = MoELayout.from_config(hf_config)
        self.hook = RouterHook.install(module, num_experts=self.layout.num_experts, top_k=self.layout.top_k)
        self._counts: list[torch.Tensor] = []
        self._replayed_before = False

    def require_routes(self, data: TensorDict, stage: str) -> None:
        """Refuse a batch without routes before anything is computed from it.

        Raises:
            ReplayError: naming the stage, the keys and what the batch holds.
        """
        if FIELD not in data.keys():
            raise ReplayError(
                f"{stage}: R3 is on ({MODE_KEY}=R3), but the batch has no '{FIELD}': the rollout recorded no routes "
                f"({FLAG_KEY} must be True for the rollout engine), or they were dropped between rollout and "
                f"{stage}. The batch holds {sorted(map(str, data.keys()))}. Without replay set {MODE_KEY}=disabled"
            )
        self._counts.clear()  # of a mini-batch that failed
        routes = data[FIELD]
        if not routes.is_nested:
            raise ReplayError(f"{stage}: '{FIELD}' is a dense {list(routes.shape)}, not jagged as the tokens are")
        width = (self.layout.num_layers, self.layout.transport_width)
        if tuple(routes.shape[-2:]) != width or routes.dtype != torch.int16:
            raise ReplayError(
                f"{stage}: '{FIELD}' is {routes.dtype} [..., {routes.shape[-2]}, {routes.shape[-1]}], not int16 "
                f"[..., {width[0]}, {width[1]}] (layers, width) as {self.layout.model_type} with "
                f"{self.layout.num_experts} experts, top-{self.layout.top_k} is recorded; rollout and training must "
                "run the same model, and verl-sat must be loaded in the agent-loop workers"
            )

    def codes(self, routes: torch.Tensor) -> torch.Tensor:
        """Routes as the hook takes them.

        Args:
            routes: int16 transport ``[rows, layers, width]``.

        Returns:
            uint8 or int16 (bits of uint16) codes ``[rows, layers, top_k]``, a view.
        """
        if self.layout.code_dtype.itemsize == 1:
            return routes.contiguous().view(torch.uint8)[..., : self.layout.top_k]
        return routes

    @contextmanager
    def micro_batch(
        self, micro_batch: TensorDict, model_inputs: dict, output_args: dict, sliced: bool, count: bool
    ) -> Iterator[None]:
        """Replay while the module runs over a micro-batch.

        Args:
            micro_batch: on the device, jagged.
            model_inputs: what verl's engine made of it for the module.
            output_args: verl's; ``pad_size`` rows were appended to the packed tokens, on all ranks of Ulysses together.
            sliced: whether Ulysses slices the tokens.
            count: whether it enters the metrics (training does, log-prob passes do not).
        """
        routes, counted = self._aligned(micro_batch, model_inputs, output_args, sliced)
        with self.hook.replay(self.codes(routes), counted=counted) as replaying:
            yield
        if count:
            self._counts.append(replaying.counts)

    def _aligned(
        self, micro_batch: TensorDict, model_inputs: dict, output_args: dict, sliced: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        routes, offsets = jagged(micro_batch[FIELD])
        if routes.shape[0] != micro_batch["input_ids"].values().shape[0]:
            raise ReplayError(
                f"'{FIELD}' has {routes.shape[0]} rows for {micro_batch['input_ids'].values().shape[0]} tokens"
            )
        counted = rows_expected(micro_batch)
        if not tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            # as verl pads the tokens: [batch, longest], unrecorded beyond a sample's end
            batch, longest = model_inputs["input_ids"].shape
            positions = torch.arange(longest, device=routes.device)
            inside = positions < offsets.diff().unsqueeze(1)
            index = torch.where(inside, offsets[:-1].unsqueeze(1) + positions, routes.shape[0]).flatten()
            routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, 1))[index]
            return routes, torch.nn.functional.pad(counted, (0, 1))[index]
        pad_size = output_args["pad_size"]
        if pad_size:
            routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, pad_size))
            counted = torch.nn.functional.pad(counted, (0, pad_size))
        if sliced:
            routes = slice_input_tensor(routes, dim=0, padding=False)
            counted = slice_input_tensor(counted, dim=0, padding=False)
        return routes, counted

    def metrics(self, expected: Expected, group: Any, sliced: bool) -> dict[str, float]:
        """``actor/r3/*`` of the mini-batch whose micro-batches have run, the same on every rank.

        Args:
            expected: of this rank's mini-batch.
            group: data-parallel process group.
            sliced: whether Ulysses slices the tokens.

        Raises:
            ReplayError: if nothing was replayed although something should have been, and nothing ever was.
        """
        device = get_device_id()
        counts = torch.stack(self._counts).sum(0) if self._counts else torch.zeros(3, dtype=torch.int64)
        self._counts.clear()
        counts = counts.to(device=device, dtype=torch.float64)
        if sliced:
            torch.distributed.all_reduce(counts, group=get_ulysses_sequence_parallel_group())
        sums = torch.cat([counts, torch.tensor(expected.as_sums(), dtype=torch.float64, device=device)])
        torch.distributed.all_reduce(sums, group=group)
        values = r3_metrics(sums.tolist(), len(self.hook.layers))  # sync ok: once for a mini-batch
        self._check(values)
        return values

    def _check(self, values: dict[str, float]) -> None:
        replayed_frac = values.get("actor/r3/replayed_frac")
        if replayed_frac is None:  # no sample that trains: nothing was expected, which proves nothing
            return
        if replayed_frac > 0.0:
            self._replayed_before = True
            return
        reasons = ", ".join(f"{name} {values[f'actor/r3/native/{name}_frac']:.0%}" for name in REASONS)
        message = (
            f"R3 is on ({MODE_KEY}=R3), but not one route of this mini-batch was replayed ({reasons}); absent: the "
            "rollout engine returned none; rejected: what it returned was invalid, the agent-loop workers' log says "
            "why; unreached: no engine got there, or nothing is known; lost: recorded, but gone before the update. "
            f"Mend that, or set {MODE_KEY}=disabled and {FLAG_KEY}=False"
        )
        if not self._replayed_before:
            raise ReplayError(message)
        warn_once(logger, "nothing replayed", "%s", message)


def r3_metrics(sums: list[float], layers: int) -> dict[str, float]:
    """The metrics from sums over ranks.

    Args:
        sums: replayed, disagreeing and expected rows x layers as the routers counted, then `Expected.as_sums`.
        layers: MoE layers.
    """
    replayed, disagreeing, counted, rows, recorded, absent, rejected, nbytes, tokens = sums
    values = {"actor/r3/bytes_per_token": nbytes / tokens if tokens else 0.0}
    if not rows:
        return values  # padding alone
    by_rows = rows * layers
    replayed_frac = replayed / by_rows
    values["actor/r3/replayed_frac"] = replayed_frac
    values["actor/r3/native_frac"] = 1.0 - replayed_frac
    values["actor/r3/disagreement_frac"] = disagreeing / replayed if replayed else 0.0
    known = {"absent": absent / rows, "rejected": rejected / rows, "lost": max(0.0, recorded / rows - replayed_frac)}
    native = {**known, "unreached": max(0.0, 1.0 - replayed_frac - sum(known.values()))}
    values.update({f"actor/r3/native/{name}_frac": native[name] for name in REASONS})
    return values


def replay_of(engine: Any) -> RouteReplay | None:
    """What an engine needs to replay, None where nothing asks for it. Called when its module is built.

    Args:
        engine: an FSDP engine of verl's.

    Raises:
        ValueError: another mode; R2 needs verl's own recording pass in Megatron or VeOmni.
        NotMoEError, UnsupportedRouterError: see `RouteReplay`.
    """
    block = engine.engine_config.router_replay
    # a plain dict where somebody set the mode without the dataclass, which verl's FSDP configuration does not name
    mode = block.get("mode", "disabled") if isinstance(block, Mapping) else block.mode
    if mode == "disabled":
        return None
    if mode != "R3":
        raise ValueError(f"{MODE_KEY}={mode}: expected disabled or R3 (FSDP replays the rollout's routes, no others)")
    if engine.engine_config.forward_only:  # a reference: native, whatever its block says
        warn_once(logger, "forward only", "router_replay.mode=R3 of a forward-only engine has no effect")
        return None
    replay = RouteReplay(engine.module, engine.model_config.hf_config)
    logger.info("verl-sat: R3 forces the choice of the routers in layers %s", replay.hook.layers)
    return replay
