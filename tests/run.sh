#!/usr/bin/env bash
# Runs the tests in .venv, which it makes if it has to.
#
#   tests/run.sh                     style and the tests that take seconds, five short trainer runs among them
#   tests/run.sh --all               also the long ones: whole training runs, two recipes among them, about 40 minutes on 2
#                                    cores, and real rollout engines (tests/engines: SGLang's capture, vLLM's CPU
#                                    build; installs 6 GB once, into VERL_SAT_ENGINES_DIR or the temporary folder)
#   tests/run.sh --verl-src PATH     also verl's own CPU tests of policy losses and actor configuration, from a checkout
#                                    of verl 0.9.x, with the plugin loaded
#   tests/run.sh [pytest arguments]  passed on
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." > /dev/null && pwd)"
source "$root/tests/environment.sh"

markers=(-m "not long")
verl_src=""
arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        --all) markers=() ;;
        --verl-src)
            [ $# -ge 2 ] || { echo "error: --verl-src needs the path of a verl checkout" >&2; exit 2; }
            verl_src="$2"
            shift
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

ensure_environment "$root"
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ ${#arguments[@]} -eq 0 ]; then
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
fi
if [ -n "$verl_src" ]; then
    .venv/bin/python tests/upstream.py "$verl_src"
fi
if [ ${#markers[@]} -eq 0 ] && [ ${#arguments[@]} -eq 0 ]; then
    arguments=(tests tests/engines) # rollout engines, each in an environment of its own outside the repository
fi
exec .venv/bin/python -m pytest "${markers[@]}" "${arguments[@]}"
