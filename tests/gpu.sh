#!/usr/bin/env bash
# What needs an NVIDIA GPU, in less than 5 minutes: the losses against verl's (time, memory, transfers; fp32 and bf16),
# the FSDP engine as verl finds it on CUDA (scopes, losses, a tiny model, one rank), and replay of routes (R3).
#
#   tests/gpu.sh                 on the GPU, with the python in use; another one: PYTHON=/path/to/python
#   tests/gpu.sh --device cpu    the same scripts with small tensors and no GPU: tries the scripts, measures nothing
#
# The python needs this package, verl 0.9.x and a CUDA build of torch. Tables are also written to out/benchmarks
# (VERL_SAT_BENCH_OUT). Exit status: 0 all checks passed, 1 a check failed, 2 usage or installation, 3 no CUDA device.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." > /dev/null && pwd)"
python="${PYTHON:-python}"
device=cuda
while [ $# -gt 0 ]; do
    case "$1" in
        --device)
            [ $# -ge 2 ] || { echo "error: --device needs cuda or cpu" >&2; exit 2; }
            device="$2"
            shift
            ;;
        *) echo "error: unknown argument $1 (see the head of $0)" >&2; exit 2 ;;
    esac
    shift
done
case "$device" in cuda | cpu) ;; *) echo "error: --device $device: cuda or cpu" >&2; exit 2 ;; esac

"$python" -c 'import torch, verl, verl_sat' > /dev/null || {
    echo "error: $python lacks torch, verl or verl_sat, see above; set PYTHON" >&2
    exit 2
}
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "tests/gpu.sh: no CUDA device here ($("$python" -c 'import torch; print("torch", torch.__version__)')), nothing was run"
    exit 3
fi

export VERL_USE_EXTERNAL_PLUGINS="${VERL_USE_EXTERNAL_PLUGINS:-verl_sat}" KINETO_LOG_LEVEL="${KINETO_LOG_LEVEL:-99}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
[ "$device" = cpu ] && export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ "$device" = cuda ] && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
status=0
for part in losses engine replay; do
    echo
    echo "== $part, on $device"
    "$python" "$root/tests/scripts/gpu_$part.py" --device "$device" || status=1
done
exit $status
