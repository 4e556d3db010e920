"""Collects ``bench_*.py`` when this folder, or something in it, is named on the command line, and never otherwise."""

import os
from pathlib import Path

import pytest

# The profiler's start and stop messages; torch reads this when it is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

HERE = Path(__file__).parent


def _asked_for(config: pytest.Config) -> bool:
    named = (Path(config.invocation_params.dir, str(argument).partition("::")[0]).resolve() for argument in config.args)
    return any(path == HERE or HERE in path.parents for path in named)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    # A file that is named itself is pytest's own business: collected twice it would run twice.
    if file_path.match("bench_*.py") and _asked_for(parent.config) and not parent.session.isinitpath(file_path):
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@pytest.fixture(scope="module")
def report(request):
    """Tables of one bench file; shown as they come, written when the file is done."""
    import harness

    report = harness.Report(Path(request.path).stem.removeprefix("bench_"))
    yield report
    report.save()
