#!/usr/bin/env bash
# Asynchronous RL of a mixture of experts at a chosen lag: every arm of arXiv 2607.18722, Table 1
#
# algorithm: ARM    grpo | gspo | grpo_tis | gspo_tis | dppo | sat_grpo | sat_gspo | grpo_fixed_eps | gspo_fixed_eps
# model:     Qwen3-30B-A3B-Base, math (recipes/data)
# engines:   SGLang rollout; ENGINE=megatron (one node of 8 GPUs) or fsdp2 (two nodes train, one samples)
# device:    NVIDIA GPUs, 80 GB or more
#
# usage: ARM=sat_gspo LAG=8 LAG_KIND=broadcast REPLAY=R3 ENGINE=megatron bash run.sh [overrides of verl's configuration ...]
#        DRY_RUN=1 prints the command and the doctor's report, and starts nothing.
set -xeuo pipefail
{ set +x; } 2> /dev/null
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" > /dev/null && pwd)"

# ---- user-adjustable ----
ARM=${ARM:-sat_gspo}
LAG=${LAG:-8}
LAG_KIND=${LAG_KIND:-broadcast}   # broadcast: weights every LAG updates; constant: LAG batches in flight
REPLAY=${REPLAY:-R3}              # R3 | none
ENGINE=${ENGINE:-megatron}        # megatron | fsdp2

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-30B-A3B-Base}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/verl_sat/train.parquet}
VAL_FILE=${VAL_FILE:-$HOME/data/verl_sat/aime24.parquet}
OUT=${OUT:-checkpoints/verl_sat}

TEMPERATURE=${TEMPERATURE:-1.0}   # the paper says 0.95 in one place, 1.0 in two
UPDATES=${UPDATES:-544}           # optimizer updates, whatever the lag
SEED=${SEED:-1}
LOGGER=${LOGGER:-'["console","file"]'}
DRY_RUN=${DRY_RUN:-0}
# ---- end user-adjustable ----

fail() { echo "error: $*" >&2; exit 2; }
arms="grpo gspo grpo_tis gspo_tis dppo sat_grpo sat_gspo grpo_fixed_eps gspo_fixed_eps"
[[ " $arms " == *" $ARM "* ]] || fail "ARM=$ARM: expected one of $arms"
[[ "$LAG" =~ ^[0-9]+$ ]] || fail "LAG=$LAG: expected a number of optimizer updates, 0 or more"
case "$LAG_KIND" in
    broadcast) sync_step=$((LAG > 0 ? LAG : 1)); warmup=$((LAG > 0 ? 1 : 0)); name="lag$LAG" ;;
    constant) sync_step=1; warmup=$LAG; name="lag$LAG"; if [ "$LAG" -gt 1 ]; then name+=_constant; fi ;;
    *) fail "LAG_KIND=$LAG_KIND: expected broadcast or constant" ;;
esac
case "$ENGINE" in megatron) r3=megatron ;; fsdp2) r3=fsdp ;; *) fail "ENGINE=$ENGINE: expected megatron or fsdp2" ;; esac
case "$REPLAY" in R3) name+="_${ARM}_r3" ;; none) name+="_$ARM"; r3=none ;; *) fail "REPLAY=$REPLAY: expected R3 or none" ;; esac
if [ "$ENGINE" = fsdp2 ]; then name+=_fsdp2; fi
EXPERIMENT=${EXPERIMENT:-${name}_seed$SEED}

RECIPE=(
    --config-dir "$here"
    --config-name "$ENGINE"
    arm="$ARM"
    r3="$r3"
    lag=lag1 # of which the next two lines make LAG
    trainer.v1.separate_async.parameter_sync_step="$sync_step"
    trainer.v1.separate_async.num_warmup_batches="$warmup"
)
DATA=(
    data.train_files="'$TRAIN_FILE'"
    data.val_files="'$VAL_FILE'"
    data.seed="$SEED"
)
MODEL=(
    actor_rollout_ref.model.path="'$MODEL_PATH'"
)
ROLLOUT=(
    actor_rollout_ref.rollout.temperature="$TEMPERATURE"
    actor_rollout_ref.rollout.seed="$SEED"
)
TRAINER=(
    trainer.experiment_name="'$EXPERIMENT'"
    trainer.default_local_dir="'$OUT/$EXPERIMENT'"
    trainer.total_training_steps="$(((UPDATES + sync_step - 1) / sync_step))"
    trainer.logger="$LOGGER"
    # a name of its own for every start: verl's file logger begins the file anew, also when a run is resumed
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="'$OUT/$EXPERIMENT/metrics.$(date +%Y%m%d-%H%M%S).jsonl'"
)
ARGUMENTS=("${RECIPE[@]}" "${DATA[@]}" "${MODEL[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@")

printf 'python3 -m verl.trainer.main_ppo'
printf ' %q' "${ARGUMENTS[@]}"
printf '\n'
status=0
verl-sat doctor "${ARGUMENTS[@]}" || status=$? # 1: warnings
if [ "$DRY_RUN" != 0 ]; then exit "$status"; fi
if [ "$status" -gt 1 ]; then fail "not started, see above"; fi
mkdir -p "$OUT/$EXPERIMENT"
set -x
python3 -m verl.trainer.main_ppo "${ARGUMENTS[@]}"
