"""An environment per engine and version, made once and then reused, outside the repository.

Folder: ``VERL_SAT_ENGINES_DIR``, by default ``verl-sat-engines`` in the directory for temporary files. 1 to 2 GB each.

Engines ask for builds of torch for GPUs, of several GB. Nothing of theirs is resolved here: the engine is installed
without dependencies, and beside it the exact packages of ``requirements/<engine>.txt``, torch 2.13.0 for the CPU among
them, again without dependencies.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("VERL_SAT_ENGINES_DIR") or Path(tempfile.gettempdir(), "verl-sat-engines"))


class CannotInstall(RuntimeError):
    """An engine cannot be had here; says what pip said."""


def ensure(engine: str, version: str) -> Path:
    """The Python of an environment with ``engine==version``.

    Args:
        engine: name of the package; its companions are in ``requirements/<engine>.txt``.
        version: exact.

    Raises:
        CannotInstall: pip cannot find or fetch something.
    """
    requirements = HERE / "requirements" / f"{engine}.txt"
    stamp = hashlib.sha256(f"{sys.version} {engine}=={version} {requirements.read_text()}".encode()).hexdigest()
    folder = ROOT / f"{engine}-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists() and ready.read_text() == stamp:
        return python
    venv.create(folder, clear=True, with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*pip, f"{engine}=={version}", "--requirement", requirements], capture_output=True, text=True, check=False
    )
    if done.returncode:
        errors = [line[:200] for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = "; ".join(errors) or done.stderr[-500:]
        raise CannotInstall(f"{engine} {version} cannot be installed in {folder}: {said}")
    ready.write_text(stamp)
    return python


def run(python: Path, script: str, *arguments: object, timeout: float = 600.0, **environment: str) -> str:
    """Run a script of this folder in an engine's environment; it sees nothing of this process's packages.

    Args:
        python: from :func:`ensure`.
        script: file name.
        arguments: of the script.
        timeout: seconds.
        environment: further variables.

    Returns:
        What it printed.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VERL", "RAY"))}
    done = subprocess.run(
        [python, HERE / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )
    if done.returncode:
        raise RuntimeError(f"{script} failed with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout
