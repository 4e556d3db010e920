"""Collects ``real_*.py`` when this folder, or something in it, is named on the command line, and never otherwise.

These tests install rollout engines, each in an environment of its own outside the repository (`environments.py`).
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _asked_for(config: pytest.Config) -> bool:
    named = (Path(config.invocation_params.dir, str(argument).partition("::")[0]).resolve() for argument in config.args)
    return any(path == HERE or HERE in path.parents for path in named)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    # A file that is named itself is pytest's own business: collected twice it would run twice.
    if file_path.match("real_*.py") and _asked_for(parent.config) and not parent.session.isinitpath(file_path):
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@pytest.fixture(scope="session")
def engine_python():
    """(engine, version) -> the Python of an environment that has it; skips, with pip's own words, where it cannot."""
    import environments

    def python_of(engine: str, version: str) -> Path:
        try:
            return environments.ensure(engine, version)
        except environments.CannotInstall as error:
            pytest.skip(str(error))

    return python_of
