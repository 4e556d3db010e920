"""What a plugin is in real Ray processes: who finds the losses there, and whether a wrapped worker method still works.

Run by `tests/test_plugin_on_cpu.py` in a process of its own; prints a JSON object.
"""

import asyncio
import json
import os

import ray

# The raylet is a child of this process and hands its environment on: it must not know the plugin's module.
os.environ.pop("VERL_USE_EXTERNAL_MODULES", None)
os.environ.pop("VERL_USE_EXTERNAL_PLUGINS", None)


@ray.remote(num_cpus=0)
class Worker:
    def loss(self, name):
        import verl  # noqa: F401
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        try:
            return get_policy_loss_fn(name).__module__
        except ValueError as error:
            return str(error)


def who_finds_the_loss():
    environments = {
        "entry point": {},
        "module passed on": {
            "VERL_USE_EXTERNAL_PLUGINS": "none",
            "VERL_USE_EXTERNAL_MODULES": "verl_sat.plugin",
        },
    }
    workers = {
        name: Worker.options(runtime_env={"env_vars": variables}).remote() for name, variables in environments.items()
    }
    futures = {name: worker.loss.remote("sat_grpo") for name, worker in workers.items()}
    return {name: ray.get(future) for name, future in futures.items()}


def make_probe():
    from verl.single_controller.base import Worker as VerlWorker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.workers.engine_workers import ActorRolloutRefWorker

    class Probe(ActorRolloutRefWorker):
        """verl's actor worker without a model: `update_weights` is inherited, as every worker of a job has it."""

        def __init__(self):
            from types import SimpleNamespace

            VerlWorker.__init__(self)
            self.seen = []
            engine = SimpleNamespace(
                note_weight_sync=lambda version: self.seen.append(["note", version]),
                get_per_tensor_param=lambda: (iter(()), None),
            )
            self.actor = SimpleNamespace(engine=engine)
            self.checkpoint_engine = self
            self.config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="gloo")))

        async def send_weights(self, weights, global_steps):
            await asyncio.sleep(0)
            self.seen.append(["send", global_steps])
            return {"sent": global_steps}

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def what_was_seen(self):
            return self.seen

    return Probe


def weight_version_through_a_worker_group():
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls

    roles = {"actor": RayClassWithInitArgs(ray.remote(make_probe()))}
    pool = RayResourcePool(process_on_nodes=[1], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(roles))
    actor = group.spawn(prefix_set=roles.keys())["actor"]
    results = [ray.get(actor.update_weights(global_steps=0)), ray.get(actor.update_weights(5))]
    return {"results": results, "seen": actor.what_was_seen()}


def main():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 1024**2, log_to_driver=False)
    try:
        result = {"losses": who_finds_the_loss(), "weights": weight_version_through_a_worker_group()}
    finally:
        ray.shutdown()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
