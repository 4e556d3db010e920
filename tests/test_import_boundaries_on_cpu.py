"""Which module may import which: the arrows of the layout, held by what the source says and by what a process loads.

The source tests read every import, also those inside functions; the process tests catch what comes in by way of others.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import verl_sat

ROOT = Path(verl_sat.__file__).parent
MODULES = {str(path.relative_to(ROOT.parent)): path for path in sorted(ROOT.rglob("*.py"))}

# module (or folder) -> what it must not import, at any level
FORBIDDEN = {
    "verl_sat/__init__.py": ("",),  # nothing at all
    "verl_sat/trust_region.py": ("verl", "verl_sat"),
    **{
        f"verl_sat/router_replay/{name}.py": (
            "verl",
            "torch",
            "transformers",
            "sglang",
            "vllm",
            "verl_sat.trust_region",
        )
        for name in ("layout", "record", "checks", "engines")
    },
    **{
        f"verl_sat/router_replay/{name}.py": ("verl", "transformers")
        for name in ("hook", "routers", "choice", "states")
    },
    "verl_sat/router_replay/client.py": ("torch", "ray", "verl_sat.engine", "verl_sat.embedded"),
    "verl_sat/policy_loss.py": ("verl_sat.router_replay", "verl_sat.engine", "verl_sat.embedded", "verl_sat.sampler"),
    "verl_sat/config.py": ("verl_sat.router_replay", "verl_sat.engine", "verl_sat.embedded", "verl_sat.policy_loss"),
    "verl_sat/metrics.py": ("verl",),
    "verl_sat/plugin.py": ("verl_sat.preflight", "verl_sat.engine", "verl.workers.engine", "ray", "hydra"),
    "verl_sat/_compat.py": ("verl", "torch", "hydra", "omegaconf"),
}


def imports_of(path):
    """Every module that a file imports, as written, with the names of `from` imports appended."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module != "__future__":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_below(name, package):
    return package == "" or name == package or name.startswith(package + ".")


@pytest.mark.parametrize("module", [name for name in FORBIDDEN if name in MODULES])
def test_a_module_does_not_import_what_it_must_not(module):
    found = [n for n in imports_of(MODULES[module]) for forbidden in FORBIDDEN[module] if is_below(n, forbidden)]
    assert found == []


def writes_to_verl(path):
    """Statements that set or delete an attribute of something imported from verl, with their line."""
    tree = ast.parse(path.read_text())
    names = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if is_below(getattr(node, "module", None) or alias.name, "verl")
    }

    def root(node):
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else None

    for node in ast.walk(tree):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "")]
        for target in targets:
            if isinstance(target, ast.Attribute) and root(target) in names:
                yield f"{path.name}:{node.lineno}"


def test_only_compat_patches_verl(tmp_path):
    assert [line for path in MODULES.values() for line in writes_to_verl(path)] == []
    # `_compat` reaches its targets by name; the others may at most wait for an import of verl
    for name, path in MODULES.items():
        used = {n for n in imports_of(path) if is_below(n, "wrapt")}
        calls = {part for part in ("wrap_function", "patch_function", "FunctionWrapper") if part in path.read_text()}
        assert name == "verl_sat/_compat.py" or not (used and calls), name

    seen = tmp_path / "seen.py"  # that the reader sees what it is to see
    seen.write_text(
        "import verl.utils.config\nfrom verl.trainer.ppo import core_algos as c\nverl.utils.config.x = 1\n"
        "c.agg_loss = None\nsetattr(c, 'y', 1)\ndel c.y\nc.REGISTRY['x'] = 1\nmine = c.agg_loss\n"
    )
    assert [line.partition(":")[2] for line in writes_to_verl(seen)] == ["3", "4", "6", "5"]


def test_the_losses_do_not_reach_what_only_the_cpu_profile_or_an_engine_needs():
    """Transitively, along our own imports."""
    graph = {name: set(imports_of(path)) for name, path in MODULES.items()}

    def file_of(name):
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            for candidate in ("/".join(parts[:end]) + ".py", "/".join(parts[:end]) + "/__init__.py"):
                if candidate in graph:
                    return candidate
        return None

    reached, todo = set(), ["verl_sat/policy_loss.py"]
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            todo += [target for target in map(file_of, graph[module]) if target]
    assert "verl_sat/trust_region.py" in reached  # or the walk sees nothing
    assert not [m for m in reached if m.startswith(("verl_sat/embedded", "verl_sat/engine", "verl_sat/router_replay"))]


def loaded_by(module):
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("verl_sat", {"verl", "torch", "wrapt", "hydra", "omegaconf", "packaging"}),
        ("verl_sat.trust_region", {"verl", "wrapt", "hydra", "omegaconf", "ray", "transformers"}),
        ("verl_sat._compat", {"verl", "torch", "hydra", "omegaconf", "ray"}),
        ("verl_sat.preflight", {"verl", "torch", "ray", "transformers"}),
    ],
)
def test_a_process_does_not_load_what_the_module_must_do_without(module, absent):
    assert not loaded_by(module) & absent


@pytest.mark.parametrize("platform, key", [("cpu", "cpu"), ("", ("cuda", "nvidia"))])
@pytest.mark.parametrize("first", ["verl_sat.engine.fsdp", "verl.workers.engine"])
def test_the_engine_is_registered_whoever_is_imported_first(platform, key, first):
    code = (
        f"import {first}, verl.workers.engine as engine; "
        f"print(engine.EngineRegistry._engines['language_model']['fsdp2'][{key!r}].__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VERL_PLATFORM": platform},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip().endswith("verl_sat.engine.fsdp"), done.stderr[-2000:]
    assert "verl-sat" not in done.stderr
