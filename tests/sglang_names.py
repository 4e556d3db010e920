"""A package `sglang` of names only, just enough for verl to import its SGLang server where SGLang is not installed."""

import dataclasses
import importlib.machinery
import sys
import types
from contextlib import contextmanager
from typing import Any

VERL_SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server"

# module -> what verl 0.9.1 imports from it
NAMES = {
    "sglang": (),
    "sglang.srt": (),
    "sglang.srt.entrypoints": (),
    "sglang.srt.entrypoints.engine": (),
    "sglang.srt.entrypoints.EngineBase": ("EngineBase",),
    "sglang.srt.entrypoints.http_server": ("ServerArgs", "_GlobalState", "app", "launch_server", "set_global_state"),
    "sglang.srt.layers": (),
    "sglang.srt.layers.moe": (),  # where `routed_experts_capturer` was; neither 0.5.12 nor 0.5.23 has it here
    "sglang.srt.managers": (),
    "sglang.srt.managers.io_struct": (
        "ContinueGenerationReqInput",
        "PauseGenerationReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "UpdateWeightsFromTensorReqInput",
    ),
    "sglang.srt.managers.tokenizer_manager": ("ServerStatus",),
    "sglang.srt.server_args": ("ServerArgs",),
    "sglang.srt.utils": (
        "MultiprocessingSerializer",
        "assert_pkg_version",
        "is_cuda",
        "kill_process_tree",
        "set_prometheus_multiproc_dir",
        "set_ulimit",
    ),
    "sglang.srt.weight_sync": (),
    "sglang.srt.weight_sync.utils": ("_preprocess_tensor_for_update_weights", "update_weights"),
}


@dataclasses.dataclass
class GenerateReqInput:
    """The fields of SGLang's request (0.5.12 and 0.5.23) that verl sets, with SGLang's defaults."""

    rid: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    return_logprob: Any = None
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    image_data: Any = None
    video_data: Any = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    lora_path: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    for attribute in NAMES[name]:
        setattr(module, attribute, type(attribute, (), {}))
    return module


@contextmanager
def installed(version: str):
    """`sglang` of ``version`` as names, and verl's server imported over it; both are gone again afterwards."""
    assert "sglang" not in sys.modules and VERL_SERVER not in sys.modules
    before = set(sys.modules)
    modules = {name: _module(name) for name in NAMES}
    modules["sglang"].__version__ = version
    modules["sglang.srt.managers.io_struct"].GenerateReqInput = GenerateReqInput
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    try:
        yield importlib.import_module(VERL_SERVER)
    finally:
        rollout = VERL_SERVER.rpartition(".")[0]
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "sglang" or name.startswith(rollout):
                del sys.modules[name]
