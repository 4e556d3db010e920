"""The gate level of a whole mini-batch, found before its first micro-batch (scope ``mini_batch``).

One forward pass without gradients gives the current log-probs of every response of the optimizer step; their quantile,
pooled over data-parallel ranks, is what every micro-batch then uses. So the gradient does not depend on how the
mini-batch is split (SPEC: scope of the quantile). Weights do not change between the two passes, but the micro-batches
differ, and with them rounding: the gate's threshold lies between the quantile and the next observation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from verl_sat import scope
from verl_sat.config import LOSS_MODE_PREFIX, SATConfig, get_sat_config
from verl_sat.loss_inputs import check_inputs, observe

SEQUENCE_LEVEL = {"sat_grpo": False, "sat_gspo": True}
# What the extra pass computes is the log-probs: these would cost it time or memory, or need the loss.
_NOT_NEEDED = dict.fromkeys(
    (
        "calculate_entropy",
        "calculate_sum_pi_squared",
        "return_model_output",
        "distillation_use_topk",
        "distillation_only",
    ),
    False,
)


def sat_settings(loss_function: Callable | None) -> tuple[str, SATConfig] | None:
    """Loss name and settings of a SAT loss, None for any other.

    Args:
        loss_function: what verl's worker passes to the engine: its loss with ``config=ActorConfig`` bound by
            `functools.partial` (`verl/workers/engine_workers.py`).
    """
    while isinstance(loss_function, functools.partial):
        policy_loss = getattr(loss_function.keywords.get("config"), "policy_loss", None)
        loss_mode = policy_loss.get("loss_mode", None) if policy_loss is not None else None
        if isinstance(loss_mode, str) and loss_mode.startswith(LOSS_MODE_PREFIX):
            return loss_mode, get_sat_config(policy_loss)
        loss_function = loss_function.func
    return None


def look_ahead(step: scope.OptimizerStep, data: TensorDict, loss_function: Callable, forward: Callable) -> None:
    """Give ``step`` what scope ``mini_batch`` needs, if that is the scope of the loss.

    Args:
        step: the surrounding optimizer step.
        data: this rank's whole mini-batch, as verl's engine gets it; not changed.
        loss_function: the loss of the step.
        forward: runs the model over a mini-batch without gradients and returns verl's output, ``log_probs`` in it.
    """
    settings = sat_settings(loss_function)
    if settings is None:
        return
    loss_mode, sat = settings
    sequence_level = SEQUENCE_LEVEL.get(loss_mode)
    if sequence_level is None or not scope.is_adaptive(sat):
        return
    if scope.resolve(sat, sequence_level, step) != "mini_batch":
        return
    if is_one_micro_batch(data, step):
        step.single_call = True
        return
    # Split as the training is: the optimizer's state is on the device too, so this pass must not need more than that.
    ahead = data.copy()
    tu.assign_non_tensor(ahead, **_NOT_NEEDED)
    log_prob = no_padding_2_padding(forward(ahead)["model_output"]["log_probs"], data)
    fields = data.select("old_log_probs", "advantages", "response_mask").to_padded_tensor().to(log_prob.device)
    inputs = check_inputs(fields["old_log_probs"], log_prob, fields["advantages"], fields["response_mask"])
    bag, sequences = observe(sequence_level, inputs)
    step.level = scope.quantile_level([bag], sequences, sat.quantile, step.group, between=True)


def is_one_micro_batch(data: TensorDict, step: scope.OptimizerStep) -> bool:
    """Whether verl will hand the mini-batch to the model in one piece, on every rank (`verl/workers/engine/utils.py`).

    With a fixed micro-batch size all ranks know by themselves; with a token budget they ask each other.
    """
    group_size = tu.get_non_tensor_data(data=data, key="force_group_size", default=1)
    if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        return len(data) == data["micro_batch_size_per_gpu"] * group_size
    input_ids = data["input_ids"]
    tokens = input_ids.offsets()[-1] if input_ids.is_nested else data["attention_mask"].sum()
    # verl multiplies by the same number, but writes it into the data only later
    budget = data["max_token_len_per_gpu"] * step.engine.ulysses_sequence_parallel_size
    fits = (tokens <= budget).to(torch.int32).to(get_device_id())
    if step.group is not None:
        torch.distributed.all_reduce(fits, op=torch.distributed.ReduceOp.MIN, group=step.group)
    return bool(fits)  # sync ok: once for a mini-batch
