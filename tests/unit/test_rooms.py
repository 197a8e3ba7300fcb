"""Imports go down only, between the packages and inside them; the rooms that must stay light stay light.

An import counts wherever it stands: at the top of a file, inside a function, or for types alone.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the ground up. A name is a room (a folder with all that is in it) or a file that stands beside the rooms.
# Names of one line do not know each other.
FLOORS = [
    ["kernels"],
    # the engine
    ["engine_actor.errors", "engine_actor.stopwatch"],
    ["engine_actor.options", "engine_actor.manifest"],
    ["engine_actor.limits"],
    ["engine_actor.memory", "engine_actor.weights"],
    ["engine_actor.actor_options", "engine_actor.sampling", "engine_actor.models"],
    ["engine_actor.messages", "engine_actor.requests"],
    ["engine_actor.scheduling"],
    ["engine_actor.decoding"],
    ["engine_actor.core"],
    ["engine_actor.sessions"],
    ["engine_actor.turns"],
    ["engine_actor.actor", "engine_actor.offline"],
    # the application
    ["serve_app.interruption", "serve_app.local_ports", "serve_app.model_store", "serve_app.config_values"],
    ["serve_app.dated_ids"],
    ["serve_app.text", "serve_app.telemetry", "serve_app.ingress"],
    ["serve_app.openai", "serve_app.generation_config"],
    ["serve_app.config", "serve_app.api"],
    ["serve_app.cluster", "serve_app.config_table"],
    ["serve_app.commands"],
    ["serve_app.jobs"],
    ["serve_app.cli"],
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
PACKAGES = ("kernels", "engine_actor", "serve_app")


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported_names(path: Path) -> set[str]:
    """Modules that a file imports, as far as a name can tell: `from a import b` is a.b where that is a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in inside}
    return names


GRAPH = {name: imported_names(path) & set(MODULES) - {name} for name, path in MODULES.items()}


def room_of(module: str) -> str | None:
    """The name in FLOORS that a module belongs to; None for a package's own front, which holds nothing."""
    parts = module.split(".")
    return next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in HEIGHT), None)


def test_every_module_has_its_floor() -> None:
    fronts = {name for name in MODULES if room_of(name) is None}
    assert fronts <= set(PACKAGES)
    assert not [name for name in HEIGHT if name not in MODULES]


@pytest.mark.parametrize("floor", FLOORS, ids=lambda floor: " ".join(floor))
def test_a_room_imports_only_from_the_floors_below(floor: list[str]) -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, imports in GRAPH.items()
        if (room := room_of(module)) in floor
        for imported in imports
        if (other := room_of(imported)) not in (None, room) and HEIGHT[str(other)] >= HEIGHT[str(room)]
    ]
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_nothing_below_the_application_imports_ray() -> None:
    for name, path in MODULES.items():
        if not name.startswith("serve_app"):
            assert not {imported for imported in imported_names(path) if imported.split(".")[0] == "ray"}, path


def test_only_what_runs_on_the_cluster_imports_ray() -> None:
    """Above the engine: the deployments, and the commands and jobs that start them."""
    allowed = {"serve_app.cluster", "serve_app.commands", "serve_app.jobs", "serve_app.telemetry"}
    for name, path in MODULES.items():
        if {imported for imported in imported_names(path) if imported.split(".")[0] == "ray"}:
            assert room_of(name) in allowed, path


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


# The names of the source documents' own loop, for the engine's options and for what is set on the way to them.
TWICE_ON_PURPOSE = {"RequestOptions", "TurnOptions"}


def test_no_class_has_the_name_of_another() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert {name for name, modules in homes.items() if len(modules) > 1} == TWICE_ON_PURPOSE
