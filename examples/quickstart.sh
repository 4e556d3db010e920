#!/usr/bin/env bash
# SAT in verl's asynchronous trainer, on a CPU, in minutes.
#
# algorithm: sat_gspo (or any loss that verl has registered), GRPO advantages
# model:     a tiny Qwen3-MoE (4 layers, 8 experts, top-2), made and warm-started on the spot
# engines:   FSDP2 trainer, Hugging Face rollout server, gloo weight transfer
# device:    2 CPU cores, about 5 GiB of memory
#
# usage: examples/quickstart.sh [--lag L] [--lag-kind constant|broadcast] [--loss NAME] [--steps N] [--seed N]
#                               [--replay R3|disabled] [--rollout-dtype fp32|bf16] [--out DIR] [hydra overrides of verl's configuration ...]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." > /dev/null && pwd)"
source "$root/tests/environment.sh"
ensure_environment "$root"
exec "$root/.venv/bin/python" -m verl_sat.embedded.quickstart "$@"
