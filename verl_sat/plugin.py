"""The entry point that verl loads (group ``verl.plugins``): importing this module registers SAT.

verl imports it in the middle of ``import verl``, in every process of a job: driver, task runner, workers,
servers, agent loops. So it imports no engine, no trainer and no rollout engine, only
`verl.trainer.ppo.core_algos`, where policy losses are registered. `VERL_USE_EXTERNAL_MODULES=verl_sat.plugin`
loads it too, and both together are fine.

verl logs the exception of a plugin at DEBUG and goes on. A user would then meet "Unsupported loss mode" much
later, or another loss. So a failure here is written to stderr with its cause and what to do, and the names of
our losses are taken by functions that refuse to run and say the same. Jobs with other losses are not affected.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import verl_sat
from verl_sat import _compat, resolvers

logger = logging.getLogger(__name__)

LOSSES = {"sat_grpo": "compute_policy_loss_sat_grpo", "sat_gspo": "compute_policy_loss_sat_gspo"}
"""Name in verl's registry -> function in `verl_sat.policy_loss`."""

_CORE_ALGOS = "verl.trainer.ppo.core_algos"
_AGG_LOSS_PARAMETERS = (
    "loss_mat",
    "loss_mask",
    "loss_agg_mode",
    "dp_size",
    "batch_num_tokens",
    "global_batch_size",
    "loss_scale_factor",
)
_POLICY_LOSS_CONFIG_FIELDS = ("loss_mode", "rollout_correction")


def register() -> None:
    """Register the losses with verl and arm the wraps of `verl_sat._compat`. Idempotent.

    Raises:
        Exception: whatever made it impossible, after it was reported on stderr and our names were taken by losses
            that refuse to run. `_compat.CompatError` if verl is not one that the plugin was written for.
    """
    _compat.FAILURES.clear()
    try:
        _register()
    except Exception as error:
        _refuse(error)
        raise


def _register() -> None:
    import verl  # noqa: F401  (a no-op in the middle of `import verl`; needed when this module comes first)

    resolvers.register()  # configurations that use them are read in every process
    _compat.require_verl()
    if _compat.cpu_profile():
        # Before anything of verl asks for the platform: engines resolve it when they are imported.
        importlib.import_module("verl_sat.embedded").install()
    else:
        # When verl imports its own FSDP engine, so that loading the plugin does not (seconds in every process).
        _compat.when_imported("verl.workers.engine.fsdp", _register_engine)
    # Before what may fail, so that the driver's preflight can say why a job with a SAT loss is not started.
    _compat.install(on_late_failure=_refuse)
    core_algos = importlib.import_module(_CORE_ALGOS)
    _check_contract(core_algos)
    policy_loss = importlib.import_module("verl_sat.policy_loss")
    for name, function_name in LOSSES.items():
        function = getattr(policy_loss, function_name)
        _report_foreign(name, core_algos.POLICY_LOSS_REGISTRY.get(name))
        core_algos.register_policy_loss(name)(function)


def _register_engine(_module: ModuleType) -> None:
    """Let our engine take verl's vendor key for FSDP on NVIDIA GPUs. In the middle of verl's import: must not raise."""
    try:
        importlib.import_module("verl_sat.engine.fsdp")  # which registers itself
    except Exception as error:
        logger.warning(
            "verl-sat: its FSDP engine could not be registered (%s: %s): verl's own runs, without scope mini_batch and "
            "actor/staleness/*",
            type(error).__name__,
            error,
        )


def _check_contract(core_algos: ModuleType) -> None:
    """Refuse a verl whose registry, aggregation or loss configuration is not what our losses call.

    Raises:
        _compat.CompatError: naming what changed.
    """
    _compat.require_parameters(core_algos.register_policy_loss, ("name",), f"{_CORE_ALGOS}.register_policy_loss")
    # Our losses pass these by name; a further parameter is harmless as long as it has a default.
    agg_loss = inspect.signature(core_algos.agg_loss).parameters
    required = tuple(
        name
        for name, parameter in agg_loss.items()
        if name in _AGG_LOSS_PARAMETERS or parameter.default is inspect.Parameter.empty
    )
    if set(required) != set(_AGG_LOSS_PARAMETERS):
        raise _compat.CompatError(
            f"verl {_compat.verl_version()}: {_CORE_ALGOS}.agg_loss has parameters {list(agg_loss)}; verl-sat calls it "
            f"with {list(_AGG_LOSS_PARAMETERS)}. Install verl=={_compat.TESTED_VERL}, or a newer verl-sat"
        )
    config_class = importlib.import_module("verl.workers.config").PolicyLossConfig
    fields = {field.name for field in dataclasses.fields(config_class)}
    missing = [name for name in _POLICY_LOSS_CONFIG_FIELDS if name not in fields]
    if missing:
        raise _compat.CompatError(
            f"verl {_compat.verl_version()}: verl.workers.config.PolicyLossConfig has no field {missing}. Install "
            f"verl=={_compat.TESTED_VERL}, or a newer verl-sat"
        )


def _is_ours(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "verl_sat"


def _report_foreign(name: str, present: Any) -> None:
    if present is None or _is_ours(present):
        return
    who = f"{getattr(present, '__module__', '?')}.{getattr(present, '__qualname__', type(present).__qualname__)}"
    code = getattr(inspect.unwrap(present) if callable(present) else None, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    logger.warning(
        "verl-sat: the policy loss %r was already registered by %s%s; verl-sat's own replaces it", name, who, where
    )


def _refuse(error: Exception) -> None:
    """Say why SAT cannot be had in this process, and let its losses say it again if they are called."""
    cause = f"{type(error).__name__}: {error}"
    if cause not in _compat.FAILURES:
        _compat.FAILURES.append(cause)
        _print_failure(error, cause)
    try:
        registry = importlib.import_module(_CORE_ALGOS).POLICY_LOSS_REGISTRY
    except Exception:
        return  # reported above; without a registry nobody can call a loss of ours either
    for name in LOSSES:
        registry[name] = _refusing_loss(name, cause)


def _refusing_loss(name: str, cause: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"loss_mode={name} is not available in this process: verl-sat could not be loaded: {cause}")

    return refuse


def _print_failure(error: Exception, cause: str) -> None:
    if isinstance(error, _compat.CompatError):
        remedy = "see the message above"
    elif isinstance(error, ImportError):
        remedy = f"install what is missing (module {error.name!r}), or reinstall verl-sat"
    else:
        remedy = "reinstall verl-sat; if it persists, report it with this message"
    # Not through logging: verl swallows the exception at DEBUG, and a process may have logging switched off.
    print(
        f"ERROR: verl-sat {verl_sat.__version__} could not be loaded into verl {_compat.verl_version()} "
        f"(process {os.getpid()}): {cause}\n"
        f"ERROR: verl-sat: the losses {', '.join(LOSSES)} will refuse to run here; other losses are not affected\n"
        f"ERROR: verl-sat: what to do: {remedy}. VERL_USE_EXTERNAL_PLUGINS=none runs verl without its plugins",
        file=sys.stderr,
        flush=True,
    )


register()
