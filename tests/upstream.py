"""Runs verl's own CPU tests of policy losses and actor configuration with this package loaded into verl.

    .venv/bin/python tests/upstream.py PATH      (or: tests/run.sh --verl-src PATH)

PATH is a checkout of verl 0.9.x; only its tests are taken from there, and nothing is written into it. They run against
the *installed* verl, in which the plugin is loaded as in any job, first as they are and then with what this package
puts in place of verl's (`upstream_plugin.py`). A table at the end says which file ran with what.

Exit status: pytest's, the first that is not 0; 2 if PATH is not such a checkout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from packaging.version import InvalidVersion, Version

RELEASE = (0, 9)
PLUGIN = Path(__file__).with_name("upstream_plugin.py")
USAGE_ERROR = 2


class NotACheckout(ValueError):
    """The path is not a checkout of a verl whose tests fit."""


def checkout_version(path: Path) -> str:
    """Version of the verl in a checkout.

    Args:
        path: the checkout.
    Raises:
        NotACheckout: no folder, no verl with tests in it, or not verl 0.9.x.
    """
    if not path.is_dir():
        raise NotACheckout(f"{path} is not a folder")
    version_file = path / "verl" / "version" / "version"
    if not version_file.is_file():
        raise NotACheckout(f"{path} is not a checkout of verl: {version_file} is missing")
    if not (path / "tests").is_dir():
        raise NotACheckout(f"{path} has no folder `tests`: a checkout of the source is needed, not an installed verl")
    text = version_file.read_text().strip()
    try:
        release = Version(text).release
    except InvalidVersion:
        raise NotACheckout(f"{version_file} holds {text!r}, which is not a version") from None
    if release[:2] != RELEASE:
        wanted = ".".join(map(str, RELEASE))
        raise NotACheckout(f"{path} is verl {text}; the tests of verl {wanted}.x are needed (git checkout v{wanted}.0)")
    return text


def installed_verl() -> Path:
    """Folder of the installed ``verl`` package, found without importing it.

    Raises:
        NotACheckout: there is none.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise NotACheckout(f"verl is not installed in {sys.executable}: nothing for the tests to test")
    return Path(spec.origin).parent


def tests_by_loss_name(checkout: Path) -> list[str]:
    """Test files that look losses up by name, and so could run with any: by their text."""
    lookup = re.compile(r"POLICY_LOSS_REGISTRY|get_policy_loss_fn")
    files = sorted((checkout / "tests").rglob("test_*.py"))
    return [f.relative_to(checkout).as_posix() for f in files if lookup.search(f.read_text(errors="replace"))]


def run(checkout: Path, installed: Path, put_in: str | None, files: Iterable[str], report: Path, work: Path) -> int:
    """One pytest process.

    Args:
        checkout: where the tests are.
        installed: the package that they must test.
        put_in: what stands in for verl's; None for nothing.
        files: test files, relative to the checkout.
        report: JSON lines of outcomes, appended to.
        work: current folder of the process.
    Returns:
        pytest's exit status.
    """
    # The plugin is run as a script, so sys.path starts with our tests folder and has neither the checkout nor the
    # current folder in it: `import verl` can only find the installed package. The plugin checks that it did.
    command = [sys.executable, str(PLUGIN), str(checkout), str(installed), str(report), put_in or "-", *files]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "VERL_USE_EXTERNAL_PLUGINS": "verl_sat"}
    environment.pop("PYTHONPATH", None)
    environment.pop("RAY_ADDRESS", None)  # a Ray of its own, nobody's cluster
    environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.run(command, cwd=work, env=environment).returncode


def table(lines: Iterable[dict[str, str]]) -> str:
    """The closing table.

    Args:
        lines: one per test: file, test, outcome (passed, failed, skipped, absent), with.
    Returns:
        A row per file and what it ran with, and below a row with something of ours the tests by name.
    """
    counts: dict[tuple[str, str], Counter] = defaultdict(Counter)
    names: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for line in lines:
        key = (line["file"], line["with"])
        counts[key][line["outcome"]] += 1
        name = line["test"].rpartition("::")[2].partition("[")[0]
        names[key][name + (": not in this checkout" if line["outcome"] == "absent" else "")] = None
    width = max([len(file) for file, _ in counts] + [4])
    rows = [f"{'file':<{width}}  passed  failed  skipped  with"]
    for (file, what), count in counts.items():
        numbers = f"{count['passed']:>6}  {count['failed']:>6}  {count['skipped']:>7}"
        rows.append(f"{file:<{width}}  {numbers}  {what}")
        if what != "verl's own":
            rows += [f"    {name}" for name in names[file, what]]
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="tests/upstream.py", description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="a checkout of verl 0.9.x")
    checkout = parser.parse_args(arguments).path
    try:
        version = checkout_version(checkout)
        installed = installed_verl()
    except NotACheckout as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    checkout = checkout.resolve()

    # Its settings, not its hooks: nothing of verl is imported here.
    import upstream_plugin as plugin

    wanted = {None: plugin.AS_THEY_ARE}
    wanted |= {name: tuple(swap.file for swap in plugin.swaps_of(name)) for name in plugin.PUT_INS}
    absent = sorted({file for files in wanted.values() for file in files if not (checkout / file).is_file()})
    statuses = []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "outcomes")
        report.touch()
        work = Path(folder, "work")
        work.mkdir()
        # Some tests read verl's YAML relative to the current folder: the installed package's, then.
        (work / "verl").symlink_to(installed)
        for put_in, files in wanted.items():
            present = [file for file in files if file not in absent]
            print(f"\n--- {'with ' + put_in if put_in else 'as they are'}: {len(present)} files", flush=True)
            statuses.append(run(checkout, installed, put_in, present, report, work) if present else 5)
        lines = [json.loads(line) for line in report.read_text().splitlines()]

    print(f"\nverl's tests of {checkout} ({version}) against the verl in {installed}, with verl-sat loaded\n")
    print(table(lines))
    for file in absent:
        print(f"{file}: not in this checkout")
    by_name = tests_by_loss_name(checkout)
    print(f"\nTests in this checkout that look losses up by name: {', '.join(by_name) if by_name else 'none'}.")
    if not by_name:
        print(
            "So none is generic over loss names. The rows with something of ours are tests that name a loss, a config"
        )
        print(
            "or a buffer of verl's and assert what ours must keep too; tests/upstream_plugin.py says what went where."
        )
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
