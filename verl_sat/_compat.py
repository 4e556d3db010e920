"""Everything that verl-sat changes inside verl, in one table.

verl has registries for most of what a plugin adds; what they do not reach is wrapped here and nowhere
else. A wrap is armed when the plugin loads and takes effect when verl itself imports the module in
question (`wrapt` post-import hooks), so that arming imports nothing. Before it wraps anything, the
installer compares verl's version and the exact parameter list of the function with what the wrap was
written for, and refuses on any difference: a changed function is never patched on trust.

Installed and not configured, every wrap calls the original with the arguments it was given.

``python -m verl_sat._compat`` prints the table as Markdown, for the documentation.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

SUPPORTED_VERL = ">=0.9.0.dev0,<0.10"
TESTED_VERL = "0.9.1"

FAILURES: list[str] = []
"""Why SAT cannot work in this process, one line each; empty when all is well. Read by the preflight."""

_MARK = "__verl_sat_patch__"
_ARMED: set[str] = set()


class CompatError(RuntimeError):
    """verl is not what a wrap was written for: its version or a signature differs."""


def always() -> bool:
    """Activation of a wrap that every process gets."""
    return True


def cpu_profile() -> bool:
    """Activation of a wrap that only verl without a GPU needs (``VERL_PLATFORM=cpu``)."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


_CONDITIONS: dict[Callable[[], bool], str] = {always: "always", cpu_profile: "`VERL_PLATFORM=cpu`"}


@dataclass(frozen=True)
class Patch:
    """One wrap of something in verl, and all that a reader of the ledger wants to know about it.

    Attributes:
        name: short identifier, unique in the ledger.
        target: ``package.module:qualified.name`` of what is wrapped.
        parameters: its exact parameter names in order; None where it is no function (then give ``guard``).
        wrap: takes the original, returns the replacement. The replacement keeps the original's attributes
            (`functools.wraps`) and stays a coroutine function if the original is one; both are checked.
        why: what verl cannot do without it.
        remove_when: what verl would have to offer for it to go.
        active: whether this process wants it, asked when the plugin loads.
        aliases: further ``module:name`` places of verl that bound the same object at import.
        guard: an additional check of the original; raises to refuse.
    """

    name: str
    target: str
    parameters: tuple[str, ...] | None
    wrap: Callable[[Any], Any]
    why: str
    remove_when: str
    active: Callable[[], bool] = always
    aliases: tuple[str, ...] = ()
    guard: Callable[[Any], None] | None = None


def verl_version() -> str:
    """Version of the verl in this process (`verl/__init__.py` sets it just before it loads plugins)."""
    loaded = getattr(sys.modules.get("verl"), "__version__", None)
    return loaded or importlib.metadata.version("verl")


def require_verl(version: str | None = None) -> None:
    """Refuse a verl that the plugin was not written for.

    Args:
        version: verl's version; this process's if None.
    Raises:
        CompatError: outside `SUPPORTED_VERL`.
    """
    version = verl_version() if version is None else version
    if not SpecifierSet(SUPPORTED_VERL).contains(version, prereleases=True):
        raise CompatError(
            f"verl {version} is not supported: this verl-sat needs verl {SUPPORTED_VERL} (tested: {TESTED_VERL}). "
            f"Install verl=={TESTED_VERL}, or a verl-sat that supports verl {version}"
        )


def require_parameters(function: Callable[..., Any], expected: Iterable[str], where: str) -> None:
    """Refuse a function whose parameter names are not exactly ``expected``, in order.

    Args:
        function: what is about to be wrapped or relied on.
        expected: parameter names.
        where: the function's full name, for the message.
    Raises:
        CompatError: on any difference; it names the function, verl's version and this module.
    """
    expected = list(expected)
    found = list(inspect.signature(function).parameters)
    if found != expected:
        raise CompatError(
            f"verl {verl_version()}: {where} has parameters {found}, not {expected}; it changed since verl-sat was "
            f"written (see verl_sat/_compat.py). Install verl=={TESTED_VERL}, or a newer verl-sat"
        )


# --- the wraps ---------------------------------------------------------------------------------------------------


def _with_preflight(original: Callable[..., Any]) -> Callable[..., Any]:
    """Look at the whole configuration in the driver, before ``original(config, ...)`` does anything with it."""

    @functools.wraps(original)
    def checked(config: Any, *args: Any, **kwargs: Any) -> Any:
        from verl_sat import preflight

        preflight.run(config)
        return original(config, *args, **kwargs)

    return checked


def _refuse_bypass_rewrite(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stop a legacy trainer that is about to write ``loss_mode='bypass_mode'`` over a SAT loss."""

    @functools.wraps(original)
    def apply_bypass_mode(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> Any:
        loss_mode = None if policy_loss_config is None else policy_loss_config.get("loss_mode", None)
        if isinstance(loss_mode, str) and loss_mode.startswith("sat_"):
            from verl_sat import preflight

            raise preflight.SATPreflightError([preflight.lost_to_bypass_rewrite(loss_mode)])
        return original(batch, rollout_corr_config, policy_loss_config)

    return apply_bypass_mode


def _tell_engine_the_version(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the version that goes to the rollout engines to our training engine as well.

    Before the transfer, not after: the engine counts optimizer steps since the weights that it sends.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = getattr(getattr(self, "actor", None), "engine", None)
        note = getattr(engine, "note_weight_sync", None)
        if note is not None:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            note(bound.arguments["global_steps"])
        return await original(self, *args, **kwargs)

    return update_weights


def _around_the_optimizer_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Open the surroundings in which a loss finds the scope of its quantile; a job without our losses never looks."""

    @functools.wraps(original)
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        from verl_sat import scope

        with scope.optimizer_step(self):
            return original(self, *args, **kwargs)

    return train_batch


def _routes_of_a_segment(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check and encode the routes of each answer of a rollout server, before verl joins or pads anything."""

    @functools.wraps(original)
    async def generate(self: Any, request_id: Any, **kwargs: Any) -> Any:
        output = await original(self, request_id, **kwargs)
        from verl_sat.router_replay import client

        await client.after_segment(self, output, kwargs["prompt_ids"], request_id, kwargs.get("sampling_params"))
        return output

    return generate


def _routes_of_a_partial_rollout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what is known of each segment's rows while verl joins the segments."""

    @functools.wraps(original)
    async def generate(self: Any, request_id: Any, **kwargs: Any) -> Any:
        from verl_sat.router_replay import client

        with client.joining() as segments:
            output = await original(self, request_id, **kwargs)
        client.after_joining(self, output, segments, len(kwargs["prompt_ids"]))
        return output

    return generate


def _routes_of_a_turn(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the first captured rows of a trajectory win over what an engine returns for them on a later turn."""

    @functools.wraps(original)
    async def handle_state(self: Any, agent_data: Any, *args: Any, **kwargs: Any) -> Any:
        from verl_sat.router_replay import client

        with client.one_turn() as turn:
            state = await original(self, agent_data, *args, **kwargs)
        client.after_turn(self, agent_data, turn)
        return state

    return handle_state


def _routes_of_sglang(original: Callable[..., Any]) -> Callable[..., Any]:
    """Read the routes that SGLang returns, where routes are asked for at all."""

    @functools.wraps(original)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.config.enable_rollout_routing_replay:
            return await original(self, *args, **kwargs)
        from verl_sat.router_replay import sglang_server

        return await sglang_server.generate(original, self, *args, **kwargs)

    return generate


def _drain_before_transfer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the exact-lag sampler wait for the requests in flight before weights are sent."""

    @functools.wraps(original)
    def on_step_end(self: Any) -> Any:
        before = getattr(getattr(self, "replay_buffer", None), "before_transfer", None)
        if before is not None:
            before(self)
        return original(self)

    return on_step_end


def _drain_before_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the exact-lag sampler wait for the requests in flight before a checkpoint is written."""

    @functools.wraps(original)
    def _save_checkpoint(self: Any) -> Any:
        before = getattr(getattr(self, "replay_buffer", None), "before_checkpoint", None)
        if before is not None:
            before(self)
        return original(self)

    return _save_checkpoint


def _report_achieved_lag(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add the achieved lag of a step's samples to its metrics."""

    @functools.wraps(original)
    def _compute_metrics(self: Any, batch: Any, metrics: Any, timing_raw: Any, global_steps: Any, epoch: Any) -> Any:
        result = original(self, batch, metrics, timing_raw, global_steps, epoch)
        from verl_sat import achieved_lag

        achieved_lag.after_metrics(self, batch, metrics, global_steps)
        return result

    return _compute_metrics


def _one_backend_for_the_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask for ``cpu:gloo`` where verl would ask for ``cpu:gloo,cpu:gloo``, which torch refuses."""

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: Any = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_global_process_group_ray


def _snapshot_by_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copy what ``Tensor.cpu()`` only aliases when the weights are on the CPU already."""

    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model: Any) -> Any:
        state, spec = original(model)
        return {name: (tensor.clone(), sharding) for name, (tensor, sharding) in state.items()}, spec

    return fsdp2_sharded_save_to_cpu


def _offload_without_pinning(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the policy without pinned memory, which only a process with an accelerator can allocate."""

    def cpu_offload_policy(pin_memory: bool = False) -> Any:
        return original(pin_memory=False)

    return cpu_offload_policy


def _takes_pin_memory(original: Callable[..., Any]) -> None:
    """parameters `pin_memory`."""
    where = "verl.workers.engine.fsdp.transformer_impl:CPUOffloadPolicy"
    require_parameters(original, ("pin_memory",), where)


_CLIENT_GENERATE = (
    "self",
    "request_id",
    "prompt_ids",
    "sampling_params",
    "image_data",
    "video_data",
    "audio_data",
    "mm_processor_kwargs",
    "kwargs",
)

LEDGER: list[Patch] = [
    Patch(
        name="preflight",
        target="verl.utils.config:validate_config",
        aliases=("verl.utils:validate_config",),
        parameters=("config", "use_reference_policy", "use_critic"),
        wrap=_with_preflight,
        why="verl has no hook that shows a plugin the whole configuration in the driver, before workers start; "
        "workers see only `actor_rollout_ref`",
        remove_when="verl offers plugins a configuration check in the driver",
    ),
    Patch(
        name="preflight_other_mains",
        target="verl.trainer.main_ppo:run_ppo",
        parameters=("config", "task_runner_class"),
        wrap=_with_preflight,
        why="`fully_async_main` never calls `validate_config`, `one_step_off_policy` calls it only in its task runner, "
        "and programs that call `run_ppo` themselves may not call it at all",
        remove_when="as `preflight`, in every entry point",
    ),
    Patch(
        name="bypass_rewrite",
        target="verl.trainer.ppo.rollout_corr_helper:apply_bypass_mode",
        parameters=("batch", "rollout_corr_config", "policy_loss_config"),
        wrap=_refuse_bypass_rewrite,
        why="the legacy trainers write `loss_mode='bypass_mode'` over the configured loss in bypass mode; a SAT job "
        "must stop rather than train another loss, even where no preflight ran",
        remove_when="the legacy trainers are removed, or leave `loss_mode` alone as V1 does",
    ),
    Patch(
        name="weight_version",
        target="verl.workers.engine_workers:ActorRolloutRefWorker.update_weights",
        parameters=("self", "global_steps", "mode"),
        wrap=_tell_engine_the_version,
        why="the version of the weights that the rollout engines get does not reach the training engine, which needs "
        "it to say how old a sample is",
        remove_when="verl passes `global_steps` to the training engine, or with the batch",
    ),
    Patch(
        name="optimizer_step",
        target="verl.workers.engine.base:BaseEngine.train_batch",
        parameters=("self", "data", "loss_function"),
        wrap=_around_the_optimizer_step,
        why="a loss is called once per micro-batch and sees nothing of the mini-batch: neither the engine and its "
        "data-parallel group (scope `dp_group`), nor where a mini-batch ends (scope `running`)",
        remove_when="verl passes the loss its engine's data-parallel group and tells it of the end of a mini-batch",
    ),
    Patch(
        name="routes_of_a_segment",
        target="verl.workers.rollout.llm_server:LLMServerClient.generate",
        parameters=_CLIENT_GENERATE,
        wrap=_routes_of_a_segment,
        why="a row without a route becomes expert 0 (zero fill), a sample without routes breaks its batch, and a "
        "segment without routes lets verl take a later version's rows for it; only where our FSDP engine replays",
        remove_when="verl carries rows that are not recorded as such",
    ),
    Patch(
        name="routes_of_a_partial_rollout",
        target="verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate",
        parameters=_CLIENT_GENERATE,
        wrap=_routes_of_a_partial_rollout,
        why="verl drops `extra_fields` of all segments but its own three; which version routed which row, and why a "
        "row is missing, would be lost",
        remove_when="verl keeps the version of each segment",
    ),
    Patch(
        name="routes_of_a_turn",
        target="verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop._handle_generating_state",
        parameters=("self", "agent_data", "sampling_params", "ignore_termination"),
        wrap=_routes_of_a_turn,
        why="verl overwrites the routes of earlier turns with the last turn's, which newer weights chose",
        remove_when="verl appends the rows of a turn (verl#6054, #7222)",
    ),
    Patch(
        name="routes_of_sglang",
        target="verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer.generate",
        parameters=(
            "self",
            "prompt_ids",
            "sampling_params",
            "request_id",
            "image_data",
            "video_data",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
        ),
        wrap=_routes_of_sglang,
        why="SGLang >= 0.5.12 returns routes as base64 text, on which verl calls `.numpy()` or which it reads with a "
        "module that SGLang has moved: with `enable_rollout_routing_replay` every request fails, Megatron's too",
        remove_when="verl decodes `meta_info['routed_experts']` itself",
    ),
    Patch(
        name="drain_before_transfer",
        target="verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.on_step_end",
        parameters=("self",),
        wrap=_drain_before_transfer,
        why="a weight transfer that meets a running request mixes versions within a response, and a sampler is not "
        "told of transfers: without it the exact-lag sampler has to wait before each batch, and generation and "
        "training do not overlap; other samplers see nothing of it",
        remove_when="verl calls its sampler before a weight transfer",
    ),
    Patch(
        name="drain_before_checkpoint",
        target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint",
        parameters=("self",),
        wrap=_drain_before_checkpoint,
        why="what is unfinished in a checkpoint is generated anew after a resume, by newer weights than the exact-lag "
        "sampler is to hand out; other samplers see nothing of it",
        remove_when="verl calls its sampler before a checkpoint",
    ),
    Patch(
        name="achieved_lag",
        target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_metrics",
        parameters=("self", "batch", "metrics", "timing_raw", "global_steps", "epoch"),
        wrap=_report_achieved_lag,
        why="verl logs mean and extremes of the lag per trajectory, and only in versions; a histogram, token weights "
        "and updates need the tags of a step's samples; only in a job with a loss or the sampler of this plugin",
        remove_when="verl logs the lag as a histogram and in updates",
    ),
    Patch(
        name="cpu_process_group",
        target="verl.utils.distributed:initialize_global_process_group_ray",
        parameters=("timeout_second", "backend"),
        wrap=_one_backend_for_the_cpu,
        active=cpu_profile,
        why="verl composes the backend as `cpu:gloo,<device>:<backend>`; with the device `cpu` torch refuses the "
        "duplicate",
        remove_when="verl composes one entry for the device `cpu`",
    ),
    Patch(
        name="cpu_snapshot",
        target="verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu",
        parameters=("model",),
        wrap=_snapshot_by_copy,
        active=cpu_profile,
        why="decoupled mode with several updates per version saves and restores the weights; of weights on the CPU the "
        "snapshot is the weights themselves, restoring does nothing and `actor/ppo_kl` is exactly 0",
        remove_when="verl clones the shards that it saves",
    ),
    Patch(
        name="cpu_offload",
        target="verl.workers.engine.fsdp.transformer_impl:CPUOffloadPolicy",
        parameters=None,
        guard=_takes_pin_memory,
        wrap=_offload_without_pinning,
        active=cpu_profile,
        why="verl's forward-only engine (the reference of a KL loss) asks for pinned memory, which torch refuses in a "
        "process without an accelerator",
        remove_when="verl pins memory only where there is an accelerator",
    ),
]


# --- the installer -----------------------------------------------------------------------------------------------


def install(on_late_failure: Callable[[Exception], None] | None = None, ledger: Iterable[Patch] | None = None) -> None:
    """Arm every active wrap of the ledger. Idempotent.

    A wrap of a module that is already imported takes effect at once, the others when verl imports theirs.

    Args:
        on_late_failure: called when a wrap is refused after this function returned, in the middle of verl's own
            import of the module: raising there would break jobs that do not use SAT. None raises.
        ledger: the wraps; `LEDGER` if None.
    Raises:
        CompatError: a wrap of an imported module is refused. Those after it are not armed.
    """
    # Here and not at the top: it is the one dependency that verl does not bring, and without it the plugin must still
    # be able to say so.
    import wrapt

    for patch in LEDGER if ledger is None else ledger:
        if patch.name in _ARMED or not patch.active():
            continue
        module_name = patch.target.partition(":")[0]
        module = sys.modules.get(module_name)
        if module is not None:
            apply(patch, module)
        else:
            wrapt.register_post_import_hook(functools.partial(_on_import, patch, on_late_failure), module_name)
        _ARMED.add(patch.name)


def when_imported(module_name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with a module once it is imported, at once if it is. Once per action and module.

    Args:
        module_name: full name.
        action: what to do; an exception of it would break the import.
    """
    import wrapt

    key = f"{module_name}:{action.__module__}.{action.__qualname__}"
    if key not in _ARMED:
        _ARMED.add(key)
        wrapt.register_post_import_hook(action, module_name)


def _on_import(patch: Patch, on_late_failure: Callable[[Exception], None] | None, module: ModuleType) -> None:
    try:
        apply(patch, module)
    except Exception as error:
        # A process of the CPU profile cannot run without its wraps: there the import itself has to fail.
        if on_late_failure is None or patch.active is cpu_profile:
            raise
        _ARMED.discard(patch.name)  # so that a second `install` meets the same refusal
        on_late_failure(error)


def apply(patch: Patch, module: ModuleType) -> None:
    """Put one wrap in place. Idempotent.

    Args:
        patch: the wrap.
        module: its target's module, imported.
    Raises:
        CompatError: verl's version, the target's existence or its parameter list is not what the wrap expects, or
            the wrap would change the kind of the function or lose attributes of it.
    """
    require_verl()
    owner: Any = module
    *path, attribute = patch.target.partition(":")[2].split(".")
    try:
        for step in path:
            owner = getattr(owner, step)
        original = vars(owner)[attribute]
    except (AttributeError, KeyError):
        raise CompatError(
            f"verl {verl_version()}: {patch.target} is gone; verl-sat wraps it ({patch.name} in "
            f"verl_sat/_compat.py). Install verl=={TESTED_VERL}, or a newer verl-sat"
        ) from None
    if isinstance(original, staticmethod | classmethod | property):
        raise CompatError(f"verl_sat/_compat.py: {patch.target} is a {type(original).__name__}; wrap what it wraps")
    present = getattr(original, _MARK, ())
    if patch.name in present:
        return
    if patch.parameters is not None:
        require_parameters(original, patch.parameters, patch.target)
    if patch.guard is not None:
        patch.guard(original)

    replacement = patch.wrap(original)
    _require_transparent(patch, original, replacement)
    setattr(replacement, _MARK, (*present, patch.name))
    setattr(owner, attribute, replacement)
    for alias in patch.aliases:
        alias_module, _, alias_name = alias.partition(":")
        holder = sys.modules.get(alias_module)
        if holder is not None and getattr(holder, alias_name, None) is original:
            setattr(holder, alias_name, replacement)


def _require_transparent(patch: Patch, original: Any, replacement: Any) -> None:
    if patch.parameters is None:
        return
    if inspect.iscoroutinefunction(original) != inspect.iscoroutinefunction(replacement):
        raise CompatError(f"verl_sat/_compat.py: the wrap {patch.name} changes whether {patch.target} is async")
    # verl's @register keeps dispatch modes as an attribute of the method; Ray loses a method without it.
    lost = sorted(set(vars(original)) - set(vars(replacement)))
    if lost:
        raise CompatError(f"verl_sat/_compat.py: the wrap {patch.name} loses {lost} of {patch.target}")


def as_markdown(ledger: Iterable[Patch] | None = None) -> str:
    """The ledger as a Markdown table, a row per wrap."""
    rows = ["| wrap | of | active | why | guarded by | can go when |", "|---|---|---|---|---|---|"]
    for patch in LEDGER if ledger is None else ledger:
        guard = f"verl {SUPPORTED_VERL}"
        if patch.parameters is not None:
            guard += f"; parameters `{', '.join(patch.parameters)}`"
        if patch.guard is not None:
            guard += f"; {(patch.guard.__doc__ or patch.guard.__name__).strip().splitlines()[0].rstrip('.')}"
        active = _CONDITIONS.get(patch.active, (patch.active.__doc__ or patch.active.__name__).strip())
        rows.append(
            f"| {patch.name} | `{patch.target}` | {active} | {patch.why} | {guard.replace('|', '/')} "
            f"| {patch.remove_when} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(as_markdown())
