"""What can be active in a router: recording, replaying, or repeating a forward in its recomputation.

Each decides what a router uses (`choice.py`), and takes note of it afterwards. Nothing here waits for the device.

Torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl_sat.router_replay.choice import Choice, ReplayError

Chosen = dict[int, tuple[Tensor, Tensor | None]]
"""Layer -> compact ids ``[rows, top_k]`` that were used, and which rows were recorded (bool ``[rows, 1]``)."""


class Recording:
    """What ``hook.record()`` gives.

    Args:
        layers: absolute numbers of the layers that are recorded, in order.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.ids: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def per_forward(self) -> list[Tensor]:
        """Expert ids of each forward, in order: int16 (int32 above 32768 experts) ``[rows, layers, top_k]``."""
        forwards = zip(*(self.ids[layer] for layer in self.layers), strict=True)
        return [torch.stack([ids.to(forward[0].device) for ids in forward], dim=1) for forward in forwards]

    def routes(self) -> Tensor:
        """All forwards, one behind the other: ``[rows, layers, top_k]``.

        Raises:
            ReplayError: if nothing ran.
        """
        forwards = self.per_forward()
        if not forwards:
            raise ReplayError("nothing was recorded: no forward ran in `with hook.record()`")
        return forwards[0] if len(forwards) == 1 else torch.cat(forwards)


class Replaying:
    """What ``hook.replay(...)`` gives.

    Attributes:
        counts: int64 ``[3]``, on the routers' device: rows x layers whose recorded ids the router used, those of them
            whose live choice was another set of experts, and all rows x layers, each within ``counted``. Recomputation
            does not count.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(3, dtype=torch.int64)
        self._moved = False

    def add(self, counts: Tensor) -> None:
        if not self._moved:  # to where the routers are: no transfer of what they count
            self.counts, self._moved = torch.zeros_like(counts), True
        self.counts += counts.to(self.counts.device)


def _without_graph(live: Callable[[], Tensor]) -> Tensor:
    """The live choice; its values are not used, and what they saved for backward would be missing in a recompute."""
    with torch.no_grad():
        return live()


class Record:
    """Keeps what the routers choose.

    Args:
        recording: where to.
        dtype: of kept ids.
    """

    verb = "recorded"

    def __init__(self, recording: Recording, dtype: torch.dtype) -> None:
        self.recording = recording
        self.dtype = dtype
        self.fired = dict.fromkeys(recording.layers, 0)

    def decide(self, layer: int, rows: int, device: torch.device, live: Callable[[], Tensor]) -> Choice:
        # forced, as it will be in a recompute: a checkpoint compares what the two save for backward
        native = _without_graph(live)
        return Choice(native, native, None)

    def commit(self, layer: int, choice: Choice) -> None:
        self.fired[layer] += 1
        self.recording.ids[layer].append(choice.live.to(self.dtype))


class Replay:
    """Replaces the choice of recorded rows.

    The codes stay as compact as they came; a layer's are widened while its router runs.

    Args:
        codes: uint8 or int16 ``[rows, L, top_k]``, see `RouterHook.replay`.
        columns: layer number -> column of the codes.
        counted: rows that enter the statistics, bool ``[rows]``, or None for all.
        replaying: counts.
        layers: with a router.
    """

    verb = "replayed"

    def __init__(
        self,
        codes: Tensor,
        columns: dict[int, int],
        counted: Tensor | None,
        replaying: Replaying,
        layers: Sequence[int],
    ) -> None:
        self.codes = codes
        self.columns = columns
        self.counted = counted
        self.rows = codes.shape[0]
        self.counted_rows = None if counted is None else counted.sum()
        self.replaying = replaying
        self.fired = dict.fromkeys(layers, 0)

    def decide(self, layer: int, rows: int, device: torch.device, live: Callable[[], Tensor]) -> Choice:
        if rows != self.rows:
            raise ReplayError(
                f"layer {layer} routes {rows} rows, but the codes to replay have {self.rows}; they must be cut and "
                "padded as the tokens are"
            )
        codes = self.codes[:, self.columns[layer]].to(device=device, dtype=torch.int64)
        if self.codes.dtype == torch.int16:  # the bits of uint16
            codes &= 0xFFFF
        recorded = (codes != 0).all(dim=-1, keepdim=True)
        native = _without_graph(live)
        return Choice(torch.where(recorded, codes - 1, native), native, recorded)

    def commit(self, layer: int, choice: Choice) -> None:
        self.fired[layer] += 1
        # the same set, as the live ids are distinct: each of them is among the replayed
        differs = ~(choice.live.unsqueeze(-1) == choice.ids.unsqueeze(-2)).any(-1).all(-1)
        used = choice.recorded.squeeze(-1)
        if self.counted is None:
            rows = torch.full((), self.rows, device=used.device)
        else:
            used, rows = used & self.counted.to(used.device), self.counted_rows.to(used.device)
        self.replaying.add(torch.stack([used.sum(), (used & differs).sum(), rows]))


class Repeat:
    """Uses the experts that the forward of this recompute used.

    Args:
        chosen: by that forward.
    """

    verb = "repeated"

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen

    def decide(self, layer: int, rows: int, device: torch.device, live: Callable[[], Tensor]) -> Choice:
        if layer not in self.chosen:
            raise ReplayError(f"layer {layer} is recomputed in backward, but its forward made no choice")
        ids, recorded = self.chosen[layer]
        if ids.shape[0] != rows:
            raise ReplayError(f"layer {layer} recomputes {rows} rows, but its forward had {ids.shape[0]}")
        return Choice(ids.to(torch.int64), None, recorded)

    def commit(self, layer: int, choice: Choice) -> None:
        pass
