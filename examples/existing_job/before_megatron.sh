#!/usr/bin/env bash
# GSPO | MoE | SGLang rollout | Megatron training | NVIDIA GPUs | verl's separate_async trainer
set -xeuo pipefail

DATA=(
    data.train_files="$HOME/data/math/train.parquet"
    data.val_files="$HOME/data/math/test.parquet"
    data.train_batch_size=512
    data.max_prompt_length=2048
    data.max_response_length=8192
    data.filter_overlong_prompts=True
    data.truncation=error
)
MODEL=(
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.hybrid_engine=False
)
ACTOR=(
    model_engine=megatron
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=3e-4
    actor_rollout_ref.actor.clip_ratio_high=4e-4
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=sglang
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.nnodes=1
    actor_rollout_ref.rollout.n_gpus_per_node=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
)
TRAINER=(
    algorithm.adv_estimator=grpo
    trainer.use_v1=True
    trainer.v1.trainer_mode=separate_async
    trainer.v1.separate_async.parameter_sync_step=4
    trainer.v1.separate_async.num_warmup_batches=1
    trainer.nnodes=2
    trainer.n_gpus_per_node=8
    trainer.test_freq=5
    trainer.save_freq=20
    trainer.total_epochs=10
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOGGING_LEVEL=WARNING
)

python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" \
    "$@"
