"""Mini-batches of verl's actor worker on the CPU, under many scopes and splits, in one process group.

Runs every scenario that it is given, in order, on each of WORLD_SIZE gloo ranks, and writes into OUT_DIR:

- ``results.json``: ``ranks``, a list (per rank) of dicts (per scenario name) of lists (per step) of what was seen, and
  ``batches``: per batch, its rows as lists (see ``Row``), with the log-probs of one plain forward pass per row;
- ``gradients.pt``: ``{"scenario/step": 1-d tensor}``, the whole gradient as the optimizer step found it.

The learning rate is 0, so that every mini-batch meets the same weights: all of verl's step runs and nothing moves.

A scenario is ``{"name", "loss", "sat", "engine", "fresh", "steps"}``. ``engine`` is ``sat`` (this plugin's, default) or
``verl`` (verl's own, registered in its place); ``fresh`` builds a new worker, as a start of a job does. A step is
``{"batches": [names], "split": "8x2", ...}``: one call of ``train_mini_batch`` with one mini-batch a name. ``split`` is
for one rank: ``CALLSxROWS``, or by a token budget ``dynamic``, ``uneven`` (the ranks would choose different numbers of
calls) or ``roomy`` (all fits into one). ``shuffled`` permutes the rows; ``fail_at`` raises in that call of the loss;
``infer`` is a forward-only pass, as for old log-probs; ``lr`` is a learning rate for this step; ``observe`` records the
log-probs before it; ``entropy`` asks for the entropy as well; ``plain`` computes the loss by the plain formula;
``rounding`` is added to the log-probs of passes without gradients, which kernels on other shapes may well do;
``direct`` calls the loss without an engine.

usage: scope_steps.py MODEL_DIR WORLD_SIZE SCENARIOS_JSON OUT_DIR
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import functools
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

ROWS, TOKENS_PER_CALL = 16, 48
# Shorter than any test's patience: a rank that waits alone raises, and the traceback says where.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=90)


@dataclasses.dataclass
class Row:
    """One response. ``staleness`` is log pi - log mu at the model's initial weights; the lists have its length."""

    number: int
    prompt: list[int]
    response: list[int]
    mask: list[int]
    staleness: list[float]
    advantages: list[float]
    old_log_probs: list[float]


def make_model(path: Path) -> None:
    """Write a one-layer Qwen3 with random weights: what a step costs here is verl's own machinery and gloo."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def log_probs_of(model, row: Row) -> torch.Tensor:
    """Log-prob of every response token by a forward pass of its own: no padding, no micro-batch, no verl."""
    ids = torch.tensor([row.prompt + row.response])
    with torch.no_grad():
        log_probs = model(ids).logits[0].log_softmax(-1)
    return log_probs[len(row.prompt) - 1 : -1].gather(-1, ids[0, len(row.prompt) :, None]).squeeze(-1)


def make_rows(model, seed: int, scale: float) -> list[Row]:
    """Responses of 3 to 12 tokens, each with its own drift, and holes in some masks.

    The drifts are spread, and the strongest belong to short responses, so that several responses and many tokens lie
    beyond the 0.9 quantile and inside plain PPO's interval. Most advantages push outward. What masked positions hold
    would ruin any statistic that read it.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    drift = torch.linspace(0.01, 0.15, ROWS)[torch.randperm(ROWS, generator=generator)] * scale
    lengths = torch.randint(5, 13, (ROWS,), generator=generator)
    lengths[drift.argsort(descending=True)[:4]] = torch.tensor([3, 4, 3, 4])
    rows = []
    for number, length in enumerate(lengths.tolist()):
        sign = -1 if number % 2 else 1
        staleness = sign * drift[number] + 0.03 * scale * normal(length)
        outward = 1 if number % 4 else -1
        row = Row(
            number=number,
            prompt=torch.randint(0, 64, (2 + number % 4,), generator=generator).tolist(),
            response=torch.randint(0, 64, (length,), generator=generator).tolist(),
            mask=[0 if number % 5 == 3 and t == length // 2 else 1 for t in range(length)],
            staleness=staleness.tolist(),
            advantages=(outward * sign * (0.2 + normal(length).abs())).tolist(),
            old_log_probs=[],
        )
        old = log_probs_of(model, row) - staleness
        row.old_log_probs = torch.where(torch.tensor(row.mask) > 0, old, -40.0).tolist()
        rows.append(row)
    return rows


def masked(row: Row, number: int | None = None) -> Row:
    """The row without a trained token; with a number of its own it is one of verl's padding rows."""
    return dataclasses.replace(row, number=row.number if number is None else number, mask=[0] * len(row.mask))


def make_batches(model) -> dict[str, list[Row]]:
    first, second, third = (make_rows(model, seed, scale) for seed, scale in ((8, 0.9), (2, 1.1), (11, 1.1)))
    half = ROWS // 2

    def spoilt(*values: float) -> list[Row]:
        """One response of the second rank with these old log-probs in front."""
        rows = copy.deepcopy(first)
        assert rows[half + 3].mask[: len(values)] == [1] * len(values)
        rows[half + 3].old_log_probs[: len(values)] = values
        return rows

    return {
        "first": first,
        "second": second,
        "third": third,
        # padding rows at the front of the first rank's share and at the end of the second's
        "padded": [masked(first[0], ROWS), masked(first[3], ROWS + 1), *first[:half]]
        + [*first[half:], masked(first[9], ROWS + 2), masked(first[12], ROWS + 3)],
        "second_rank_masked": first[:half] + [masked(row) for row in first[half:]],
        # calls of 4 rows: one on each rank is masked as a whole, at different places
        "calls_masked": [masked(row) if row.number in (0, 1, 2, 3, 12, 13, 14, 15) else row for row in first],
        "all_masked": [masked(row) for row in first],
        "nan": spoilt(math.nan),
        "infinite": spoilt(-math.inf),
        "unrecorded": spoilt(0.0, 0.0),  # a fill value, which the loss leaves out
    }


def tensor_dict(rows: list[Row]):
    """The rows as the V1 trainer sends them: jagged, unpadded."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    def jagged(values, dtype):
        return torch.nested.as_nested_tensor([torch.tensor(v, dtype=dtype) for v in values], layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": jagged([row.prompt + row.response for row in rows], torch.long),
            "position_ids": jagged([range(len(row.prompt) + len(row.response)) for row in rows], torch.long),
            "prompts": jagged([row.prompt for row in rows], torch.long),
            "responses": jagged([row.response for row in rows], torch.long),
            "response_mask": jagged([row.mask for row in rows], torch.long),
            "loss_mask": jagged([[0] * len(row.prompt) + row.mask for row in rows], torch.long),
            "old_log_probs": jagged([row.old_log_probs for row in rows], torch.float32),
            "advantages": jagged([row.advantages for row in rows], torch.float32),
            "row": torch.tensor([row.number for row in rows]),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor(data, temperature=1.0, global_batch_size=ROWS)
    return data


class Recorder:
    """Watches one worker's engine from outside; everything it wraps is called with what it was given."""

    def __init__(self, worker: Any) -> None:
        self.engine = engine = worker.engine
        engine.forward_backward_batch = self._around(engine.forward_backward_batch, self._mini_batch)
        engine.forward_step = self._around(engine.forward_step, self._call)
        engine.optimizer_step = self._around(engine.optimizer_step, self._optimizer_step)
        engine.prepare_model_outputs = self._around(engine.prepare_model_outputs, self._outputs)
        engine.module.register_forward_pre_hook(self._forward, with_kwargs=True)
        self.rounding = 0.0
        self.clear()

    def clear(self) -> None:
        self.forwards, self.forward_rows, self.backwards = 0, 0, 0
        self.modes = []
        self.calls, self.metrics, self.gradients = [], [], []

    @staticmethod
    def _around(original, recording):
        @functools.wraps(original)
        def recorded(*args, **kwargs):
            return recording(original, *args, **kwargs)

        return recorded

    def _forward(self, module, args, kwargs) -> None:
        self.forwards += 1
        self.modes.append([torch.is_grad_enabled(), module.training])
        self.forward_rows += kwargs["input_ids"].shape[0]

    def _call(self, original, micro_batch, loss_function, forward_only):
        if forward_only:
            return original(micro_batch, loss_function=loss_function, forward_only=forward_only)
        self.calls[-1].append(micro_batch["row"].tolist())
        loss, output = original(micro_batch, loss_function=loss_function, forward_only=forward_only)
        loss.register_hook(self._backward)
        return loss, output

    def _backward(self, _gradient) -> None:
        self.backwards += 1

    def _mini_batch(self, original, data, loss_function, forward_only=False):
        if forward_only:
            return original(data, loss_function, forward_only=forward_only)
        self.calls.append([])
        output = original(data, loss_function, forward_only=forward_only)
        self.metrics.append({key: _numbers(value) for key, value in output["metrics"].items()})
        return output

    def _outputs(self, original, *args, **kwargs):
        output = original(*args, **kwargs)
        if self.rounding and not torch.is_grad_enabled():
            output["log_probs"] = output["log_probs"] + self.rounding
        return output

    def _optimizer_step(self, original):
        self.gradients.append(_gradient(self.engine.module))
        return original()


def _numbers(value: Any) -> list[float]:
    return [float(v) for v in getattr(value, "values", value)]


def _gradient(module) -> torch.Tensor:
    parts = []
    for parameter in module.parameters():
        gradient = parameter.grad
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        parts.append((gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach().flatten())
    return torch.cat(parts).clone()


class Group:
    """The workers of this rank, one for each engine, rebuilt where a scenario wants a fresh start."""

    def __init__(self, model_dir: Path) -> None:
        import plain_actor_step as plain
        from verl.workers.engine import EngineRegistry
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        register, EngineRegistry.register = EngineRegistry.register, lambda **_: lambda cls: cls
        try:  # the registry finds this plugin's engine for the CPU by itself
            worker = plain.make_worker(model_dir, ["actor_rollout_ref.actor.optim.lr=0"])
        finally:
            EngineRegistry.register = register
        self._registry = EngineRegistry._engines["language_model"]["fsdp2"]
        self._classes = {"sat": self._registry["cpu"], "verl": FSDPEngineWithLMHead}
        self._config = copy.deepcopy(worker.config)
        self.actor_config = worker.loss_fn.keywords["config"]
        self._recorders = {"sat": (worker, Recorder(worker))}

    def worker(self, engine: str, fresh: bool) -> tuple[Any, Recorder]:
        if fresh or engine not in self._recorders:
            from verl.workers.engine_workers import TrainingWorker

            self._registry["cpu"] = self._classes[engine]
            try:
                worker = TrainingWorker(copy.deepcopy(self._config))
                worker.reset()
            finally:
                self._registry["cpu"] = self._classes["sat"]
            self._recorders[engine] = (worker, Recorder(worker))
        return self._recorders[engine]


def loss_config(group: Group, scenario: dict[str, Any]) -> Any:
    from verl_sat.config import SATPolicyLossConfig

    loss = scenario["loss"]
    config = copy.deepcopy(group.actor_config)
    if loss.startswith("sat_"):
        policy_loss = SATPolicyLossConfig(loss_mode=loss, sat=scenario.get("sat", {}))
    else:
        policy_loss = type(config.policy_loss)(loss_mode=loss)
    sequence_level = loss.endswith("gspo")
    changes = {
        "policy_loss": policy_loss,
        "loss_agg_mode": "seq-mean-token-mean" if sequence_level else "token-mean",
    }
    for name, value in changes.items():
        object.__setattr__(config, name, value)  # verl freezes it
    return config


def rank_share(rows: list[Row], step: dict[str, Any], rank: int, world_size: int) -> list[Row]:
    if step.get("shuffled"):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(7)).tolist()
        rows = [rows[i] for i in order]
    share = len(rows) // world_size
    return rows[rank * share : (rank + 1) * share]


def split_settings(split: str, rows: list[Row], world_size: int) -> dict[str, Any]:
    if "x" in split:
        return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": int(split.partition("x")[2])}
    # Half of all tokens: two ranks that do not hold the same number need one call and two.
    half = sum(len(row.prompt) + len(row.response) for row in rows) // 2
    budget = {"dynamic": TOKENS_PER_CALL, "uneven": half, "roomy": 2 * half + 1}[split]
    return {"use_dynamic_bsz": True, "max_token_len_per_gpu": budget}


@contextlib.contextmanager
def failing(loss: str, at: int | None) -> Iterator[None]:
    """The loss raises in its call number ``at``, counted from 1; None: never."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    original, calls = POLICY_LOSS_REGISTRY[loss], [0]

    @functools.wraps(original)
    def loss_that_fails(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at:
            raise ArithmeticError("the loss failed on purpose")
        return original(*args, **kwargs)

    if at is not None:
        POLICY_LOSS_REGISTRY[loss] = loss_that_fails
    try:
        yield
    finally:
        POLICY_LOSS_REGISTRY[loss] = original


def run_step(worker, recorder, config, scenario, step, batches, rank, world_size) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu

    shares = [rank_share(batches[name], step, rank, world_size) for name in step["batches"]]
    settings = split_settings(step["split"], batches[step["batches"][0]], world_size)
    seen: dict[str, Any] = {"error": None}
    if step.get("observe"):
        seen["log_probs"] = observe(worker, shares[0], settings)
    recorder.clear()
    recorder.rounding = step.get("rounding", 0.0)
    data = tensor_dict([row for share in shares for row in share])
    tu.assign_non_tensor(data, calculate_entropy=step.get("entropy", False), **settings)
    optimizer = worker.engine.optimizer
    for parameters in optimizer.param_groups:
        parameters["lr"] = step.get("lr", 0.0)
    try:
        config = config()
        worker.set_loss_fn(partial(ppo_loss_of_verl(), config=config))
        if step.get("plain"):
            os.environ["VERL_SAT_LOSS"] = "plain"
        if step.get("direct"):
            call_without_engine(scenario["loss"], config, shares[0])
        elif step.get("infer"):
            tu.assign_non_tensor(data, compute_loss=step["infer"] == "loss")
            worker.infer_batch(data)
        else:
            tu.assign_non_tensor(data, mini_batch_size=len(shares[0]) * world_size, epochs=1)
            with failing(scenario["loss"], step.get("fail_at")):
                metrics = tu.get(worker.train_mini_batch(data), "metrics")
            seen["loss"] = _numbers(metrics["loss"])
            seen["grad_norm"] = _numbers(metrics["grad_norm"])
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
        seen["traceback"] = traceback.format_exc()
    finally:
        os.environ.pop("VERL_SAT_LOSS", None)
    seen |= {
        "forwards": recorder.forwards,
        "modes": recorder.modes,
        "forward_rows": recorder.forward_rows,
        "calls": recorder.calls,
        "metrics": recorder.metrics,
        "gradients": recorder.gradients,
        "backwards": recorder.backwards,
    }
    return seen


def ppo_loss_of_verl():
    from verl.workers.utils.losses import ppo_loss

    return ppo_loss


def observe(worker, rows: list[Row], settings: dict[str, Any]) -> dict[int, list[float]]:
    """Log-probs of the response tokens at the current weights, by verl's forward-only pass."""
    from verl.utils import tensordict_utils as tu

    data = tensor_dict(rows)
    tu.assign_non_tensor(data, compute_loss=False, **settings)
    output = worker.infer_batch(data)["log_probs"].unbind()
    return {
        row.number: log_probs[len(row.prompt) - 1 : -1].tolist() for row, log_probs in zip(rows, output, strict=True)
    }


def call_without_engine(loss: str, config, rows: list[Row]) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    def padded(name):
        tensors = [torch.tensor(getattr(row, name), dtype=torch.float32) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    old_log_prob = padded("old_log_probs")
    get_policy_loss_fn(loss)(
        old_log_prob=old_log_prob,
        log_prob=(old_log_prob + padded("staleness")).requires_grad_(),
        advantages=padded("advantages"),
        response_mask=padded("mask").bool(),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )


def run_rank(rank: int, world_size: int, model_dir: str, store: str, scenarios: list[dict], out_dir: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="0", VERL_PLATFORM="cpu")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    import verl  # noqa: F401  (first, so that the plugin has its platform before an engine is imported)
    from transformers import AutoModelForCausalLM

    started = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    batches = make_batches(model)
    group = Group(Path(model_dir))
    results: dict[str, list[dict[str, Any]]] = {}
    gradients: dict[str, torch.Tensor] = {}
    tainted = set()
    for scenario in scenarios:
        if rank == 0:
            print(f"scenario {time.monotonic() - started:.1f} s: {scenario['name']}", file=sys.stderr, flush=True)
        engine = scenario.get("engine", "sat")
        worker, recorder = group.worker(engine, scenario.get("fresh", False) or engine in tainted)
        tainted.discard(engine)
        config = functools.partial(loss_config, group, scenario)
        results[scenario["name"]] = []
        for number, step in enumerate(scenario["steps"]):
            seen = run_step(worker, recorder, config, scenario, step, batches, rank, world_size)
            for index, gradient in enumerate(seen.pop("gradients")):
                gradients[f"{scenario['name']}/{number}/{index}"] = gradient
            seen["engine"] = f"{type(worker.engine).__module__}.{type(worker.engine).__qualname__}"
            if seen["error"] is not None or step.get("lr"):
                tainted.add(engine)
            results[scenario["name"]].append(seen)
    Path(out_dir, f"rank{rank}.json").write_text(json.dumps(results))
    if rank == 0:
        torch.save(gradients, Path(out_dir, "gradients.pt"))
        plain_pass = {
            name: [dataclasses.asdict(row) | {"log_probs": log_probs_of(model, row).tolist()} for row in rows]
            for name, rows in batches.items()
        }
        Path(out_dir, "batches.json").write_text(json.dumps(plain_pass))
    torch.distributed.destroy_process_group()


def main() -> None:
    model_dir, world_size, scenarios, out_dir = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    scenarios = json.loads(Path(scenarios).read_text())
    if not (Path(model_dir) / "config.json").exists():
        make_model(Path(model_dir))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, model_dir, f"{folder}/store", scenarios, str(out_dir))
        if world_size == 1:
            run_rank(0, *arguments)
        else:
            torch.multiprocessing.spawn(run_rank, arguments, nprocs=world_size)
    result = {
        "ranks": [json.loads((out_dir / f"rank{rank}.json").read_text()) for rank in range(world_size)],
        "batches": json.loads((out_dir / "batches.json").read_text()),
    }
    (out_dir / "results.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
