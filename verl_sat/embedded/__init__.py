"""verl without a GPU: platform, rollout server, weight transfer, tiny model and task.

Nothing here is imported unless ``VERL_PLATFORM=cpu`` asks for it.
"""

from __future__ import annotations

from verl_sat import _compat


def install() -> None:
    """Register the CPU parts with verl's registries. Idempotent; called by the plugin.

    The platform at once: verl resolves its device when it imports an engine. The engine and the rollout
    backend when verl imports their registries, so that loading the plugin imports neither.
    """
    from verl_sat.embedded import platform

    platform.register()
    _compat.when_imported("verl.workers.engine.fsdp", _register_engine)
    _compat.when_imported("verl.workers.rollout.replica", _register_rollout)


def _register_engine(_module: object) -> None:
    import verl_sat.engine.fsdp  # noqa: F401  (registers itself)


def _register_rollout(module: object) -> None:
    def load_replica() -> type:
        from verl_sat.embedded.rollout import HFReplica

        return HFReplica

    module.RolloutReplicaRegistry.register("hf", load_replica)
