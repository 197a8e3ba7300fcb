"""Imports go down only, and the rooms that must stay light stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {"kernels": 0, "engine_actor": 1, "serve_app": 2}
FILES = [path for room in FLOORS for path in sorted((ROOT / room).rglob("*.py"))]


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_from_its_own_floor_and_below(path: Path) -> None:
    floor = FLOORS[path.relative_to(ROOT).parts[0]]
    above = {name for name in imported_modules(path) if FLOORS.get(name.split(".")[0], 0) > floor}
    assert not above


def test_nothing_in_the_engine_imports_ray() -> None:
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ("engine_actor", "kernels"):
            assert not {name for name in imported_modules(path) if name.split(".")[0] == "ray"}, path


@pytest.mark.parametrize(
    "module",
    [
        "engine_actor.scheduling.scheduler",
        "engine_actor.scheduling.preemption",
        "engine_actor.memory.cache_manager",
        "engine_actor.memory.sizing",
        "engine_actor.sessions.table",
        "engine_actor.turns.queue",
        "engine_actor.turns.waiting_room",
        "engine_actor.core.engine",
        "engine_actor.messages",
    ],
)
def test_scheduling_memory_and_sessions_load_without_torch_and_ray(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'ray'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
