# The virtual environment of the quickstart and of the tests: .venv beside setup.cfg. Sourced, not run.
#
# Made once and then reused; rebuilt when setup.cfg changes. Another interpreter: PYTHON=python3.12.
# On a machine with a CUDA build of torch 2.13 in the package index, install the CPU build first:
# pip install torch==2.13.0 from an index of CPU builds, into .venv.

ensure_environment() {
    local root="$1" stamp
    stamp="$(sha256sum "$root/setup.cfg" | cut -d' ' -f1)"
    if [ -x "$root/.venv/bin/python" ] && [ "$(cat "$root/.venv/.verl-sat" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    echo "making $root/.venv (once; about a minute with warm downloads)"
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "error: Python 3.10 or newer is needed; set PYTHON to one" >&2
        return 1
    }
    [ -x "$root/.venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$root/.venv"
    # torch by itself first: the exact version keeps every later range from choosing another build
    "$root/.venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" \
        && "$root/.venv/bin/pip" install --quiet --disable-pip-version-check --editable "$root[cpu,report,test]" \
        || { echo "error: installation failed, see above" >&2; return 1; }
    echo "$stamp" > "$root/.venv/.verl-sat"
}
