"""The part of the doctor that imports verl, a process of its own: does verl load the plugin, and take this job?

``python -m verl_sat.doctor.child`` reads one JSON object from standard input (the resolved configuration, keys to look
up) and writes one line of JSON after :data:`MARK`. A process of its own, because importing verl prints, takes seconds,
and because what is asked is what a fresh worker would see.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import json
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

MARK = "verl-sat-doctor-result:"


def main() -> None:
    """Read the question from standard input, answer on standard output."""
    question = json.load(sys.stdin)
    answer: dict[str, Any] = {"findings": []}
    said = io.StringIO()
    with redirect_stdout(said):
        try:
            _answer(question, answer)
        except Exception as error:  # verl that cannot be imported, above all
            answer["failure"] = "".join(traceback.format_exception_only(error)).strip()
    answer["printed"] = said.getvalue()[-2000:]
    print(MARK + json.dumps(answer, default=str))


def _answer(question: dict[str, Any], answer: dict[str, Any]) -> None:
    from omegaconf import OmegaConf

    start = time.perf_counter()
    import verl  # noqa: F401  (loads the plugin by its entry point, as in every process of a job)

    answer["seconds_to_import_verl"] = time.perf_counter() - start
    answer["plugin_loaded_by_verl"] = "verl_sat.plugin" in sys.modules
    from verl_sat import _compat

    answer["plugin_failures"] = list(_compat.FAILURES)
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    losses = core_algos.POLICY_LOSS_REGISTRY
    answer["losses"] = {name: f"{fn.__module__}.{fn.__qualname__}" for name, fn in losses.items()}
    config = OmegaConf.create(question["config"])
    answer["findings"] += _fields(config, question["keys"])
    if question["validate"] and not answer["findings"]:
        answer["findings"] += list(_validate(config, answer.setdefault("not_checked", [])))


def _fields(config: Any, keys: list[str]) -> list[dict[str, str]]:
    """Extra keys of blocks that become dataclasses, which have no such field."""
    from omegaconf import OmegaConf

    from verl_sat.doctor.keys import unread

    found = []
    for key in keys:
        parent, _, name = key.rpartition(".")
        module, _, cls = OmegaConf.select(config, parent)["_target_"].rpartition(".")
        try:
            fields = [field.name for field in dataclasses.fields(getattr(importlib.import_module(module), cls))]
        except (ImportError, AttributeError, TypeError) as error:
            message = f"{module}.{cls} is no dataclass that can be imported here ({error})"
            found.append({"level": "error", "key": f"{parent}._target_", "message": message, "remedy": ""})
            continue
        if name not in fields:
            found.append(dataclasses.asdict(unread(config, key, fields)))
    return found


def _validate(config: Any, not_checked: list[str]) -> Iterator[dict[str, str]]:
    """verl's own checks, and the dataclasses that its driver and workers build; the model is not looked at.

    Args:
        config: resolved.
        not_checked: filled with what needs a package that is not on this machine, which is no fault of the job.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    plain = getattr(validate_config, "__wrapped__", validate_config)  # our preflight is asked separately
    actor = config.actor_rollout_ref.actor
    parts = [("", lambda: plain(config, need_reference_policy(config), need_critic(config)))]
    parts.append(("actor_rollout_ref.rollout", lambda: omega_conf_to_dataclass(config.actor_rollout_ref.rollout)))
    if need_reference_policy(config):
        parts.append(("actor_rollout_ref.ref", lambda: omega_conf_to_dataclass(_as_worker_reads(config, actor))))
    for key, build in parts:
        try:
            build()
        except Exception as error:
            # The innermost exception names the reason; Hydra's around it names the block.
            causes = [error]
            while causes[-1].__cause__ is not None:
                causes.append(causes[-1].__cause__)
            text = " ".join(str(causes[-1]).split()) or type(causes[-1]).__name__
            if isinstance(causes[-1], ImportError) or _names_an_absent_package(text):
                not_checked.append(f"{key or 'the checks of verl'}: {text}")
                continue
            named = re.search(r"full_key: (\S+)", str(error))
            where = named.group(1) if named else key or "actor_rollout_ref.actor"
            yield {"level": "error", "key": where, "message": f"verl refuses it: {text}", "remedy": ""}
            return


def _names_an_absent_package(text: str) -> bool:
    """verl also says so by its own exceptions (``vllm version None not supported``)."""
    if not re.search(r"not found|version none|no module|not installed|not available", text, flags=re.I):
        return False  # a mistake in the settings of an engine is one, whether or not the engine is here
    engines = ("vllm", "sglang", "megatron", "tensorrt_llm", "flash_attn")
    return any(name in text.lower() and importlib.util.find_spec(name) is None for name in engines)


def _as_worker_reads(config: Any, actor: Any) -> Any:
    """The reference's block after verl's worker renamed four keys (`verl/workers/engine_workers.py`)."""
    from omegaconf import OmegaConf, open_dict

    block = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref, resolve=True)["ref"])
    with open_dict(block):
        block.ppo_mini_batch_size = actor.ppo_mini_batch_size
        for old, new in (
            ("log_prob_micro_batch_size", "ppo_micro_batch_size"),
            ("log_prob_micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu"),
            ("log_prob_use_dynamic_bsz", "use_dynamic_bsz"),
            ("log_prob_max_token_len_per_gpu", "ppo_max_token_len_per_gpu"),
        ):
            setattr(block, new, block.pop(old, None))
    return block


if __name__ == "__main__":
    main()
