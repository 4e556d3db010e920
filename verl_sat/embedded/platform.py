"""A CPU platform for verl: `VERL_PLATFORM=cpu`.

verl 0.9 knows CUDA, ROCm and NPU. Its platform registry (`verl/plugin/platform`) takes more, so this
is an ordinary entry of it, registered by `verl_sat.plugin` when the environment variable asks for it,
before anything imports an FSDP engine (`verl/workers/engine/fsdp/transformer_impl.py` resolves the
device at import).

Ray sees the CPU slots as logical GPUs (``ray_init.num_gpus``): verl counts its resource pools in them
(`verl/single_controller/ray/base.py`).
"""

from __future__ import annotations

import os
import resource
import types
from contextlib import contextmanager
from typing import Any

import psutil
import torch

PLATFORM_NAME = "cpu"
ENV_VAR = "VERL_PLATFORM"


def is_requested() -> bool:
    """Whether this process was started for the CPU profile (``VERL_PLATFORM=cpu``)."""
    return os.environ.get(ENV_VAR, "").strip().lower() == PLATFORM_NAME


def _peak_rss_bytes(*_args: Any, **_kwargs: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _mem_get_info(*_args: Any, **_kwargs: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _make_device_module() -> types.ModuleType:
    """`torch.cpu` plus the memory calls that verl makes on `torch.cuda`.

    There is no separate device memory on a CPU, so ``max_memory_*`` report the peak resident set of the
    process: verl logs them as ``perf/max_memory_*_gb``.
    """
    module = types.ModuleType("verl_sat.embedded.cpu_device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    module.max_memory_allocated = _peak_rss_bytes
    module.max_memory_reserved = _peak_rss_bytes
    module.memory_allocated = _peak_rss_bytes
    module.memory_reserved = _peak_rss_bytes
    module.mem_get_info = _mem_get_info
    module.empty_cache = _nothing
    module.reset_peak_memory_stats = _nothing
    module.get_device_name = lambda *_: "CPU"  # verl looks up the peak FLOPS by it
    module.manual_seed = torch.manual_seed
    module.manual_seed_all = torch.manual_seed
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    return module


def register() -> None:
    """Register the platform with verl under ``cpu``. Idempotent."""
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    if PlatformRegistry.get(PLATFORM_NAME) is not None:
        return

    device_module = _make_device_module()

    @PlatformRegistry.register(platform=PLATFORM_NAME)
    class PlatformCPU(PlatformBase):
        """verl's platform interface on a CPU (see `verl/plugin/platform/platform_base.py`)."""

        device_name = PLATFORM_NAME
        vendor_name = "generic"

        @property
        def device_module(self) -> types.ModuleType:
            return device_module

        def is_available(self) -> bool:
            return is_requested()

        def current_device(self) -> str:  # verl passes it to Tensor.to
            return PLATFORM_NAME

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            return None

        def synchronize(self, device_index: int | None = None) -> None:
            return None

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            return None

        def empty_cache(self) -> None:
            return None

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its logical GPUs

        @contextmanager
        def nvtx_range(self, msg: str):
            yield

        def profiler_start(self) -> None:
            return None

        def profiler_stop(self) -> None:
            return None

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None
