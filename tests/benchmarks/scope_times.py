"""Times training steps of every scope in one process and prints them as JSON; run by `bench_scopes.py`.

usage: scope_times.py MODEL_DIR PLAN_JSON   (with VERL_PLATFORM=cpu)

The plan is a list of ``{"loss", "rows", "response", "micro_batches", "rounds"}``, ``loss`` being ours; the result a
list of ``{"rounds": {case: [ms]}, "refused": {case: reason}, "forwards": {case: count}}`` with verl's loss as the case
"verl".
"""

import json
import sys
from pathlib import Path

import harness
import torch
import training

SCOPES = ("micro_batch", "dp_group", "running", "mini_batch")


class Step:
    """A step of one case: the loss is exchanged outside the clock."""

    def __init__(self, actor, batch, micro_batch_size, loss, sat=None):
        self.actor, self.batch, self.micro_batch_size = actor, batch, micro_batch_size
        self.actor.use(loss, sat)
        self.loss_function = actor.worker.loss_fn

    def prepare(self):
        self.actor.worker.set_loss_fn(self.loss_function)

    def __call__(self):
        return self.actor.step(self.batch, self.micro_batch_size)


def run(actor, forwards, item) -> dict:
    batch = training.make_batch(item["rows"], item["response"], training.Size().vocabulary)
    size = item["rows"] // item["micro_batches"]
    cases = {"verl": Step(actor, batch, size, harness.LOSSES[item["loss"]])}
    cases |= {scope: Step(actor, batch, size, item["loss"], {"scope": scope}) for scope in SCOPES}
    result = {"refused": {}, "forwards": {}}
    for name, case in list(cases.items()):  # also the warm-up
        forwards.clear()
        case.prepare()
        try:
            case()
        except Exception as error:  # reported: a scope that cannot be had is a cell of the table
            if name == "verl":
                raise
            result["refused"][name] = f"{type(error).__name__}: {error}"
            del cases[name]
        else:
            result["forwards"][name] = len(forwards)
    result["rounds"] = harness.time_interleaved(cases, rounds=item["rounds"], warm_up=0).rounds
    return result


def main() -> None:
    torch.set_num_threads(1)
    import verl  # noqa: F401  (loads the plugin, and with it the CPU platform, before any engine)

    training.start_process_group("gloo")
    actor = training.Actor(Path(sys.argv[1]), training.Size())
    forwards = []
    actor.worker.engine.module.register_forward_pre_hook(lambda *_: forwards.append(1))
    results = [run(actor, forwards, item) for item in json.loads(sys.argv[2])]
    torch.distributed.destroy_process_group()
    engine = type(actor.worker.engine)
    print("RESULT " + json.dumps({"engine": f"{engine.__module__}.{engine.__qualname__}", "results": results}))


if __name__ == "__main__":
    main()
