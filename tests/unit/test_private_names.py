"""Of the tests, only the two views read what the engine keeps private: a name changes there, and in one place here.

Looked at by name, since a syntax tree knows no types: what is private in a class of the engine is not read from, or
replaced in, anything but `self`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
VIEWS = {TESTS / "support" / "engine_view.py", TESTS / "support" / "actor_view.py"}
# Of objects that are not the engine's, and have a name that one of the engine's has too.
OTHERS = {
    "unit/cli/test_cli.py": {"_load"},  # of the library of kernels
    "unit/cli/test_preflight.py": {"_start"},  # the command's
    "unit/failover/test_turn.py": {"_places", "_watch"},  # the client's watch over replicas
    "unit/proxy/test_protocol.py": {"_buffer"},  # asyncio's reader
    "unit/text/test_text_stream.py": {"_matcher"},  # the text's search for stop strings
}
REPLACING = {"setattr", "getattr", "delattr", "hasattr"}  # also as methods of a monkeypatch


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names that classes give to methods and to attributes of `self`."""
    for defined in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(defined):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_private(node.name):
                yield node.name
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and is_private(node.attr):
                yield node.attr


def reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of private attributes read from anything but `self`, `cls` and `super()`, by name or by string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            name = node.args[1]
            if called in REPLACING and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield from [(node.lineno, name.value)] if is_private(name.value) else []


ENGINES = {
    name for path in (ROOT / "engine_actor").rglob("*.py") for name in private_names(ast.parse(path.read_text()))
}


def test_only_the_views_read_what_the_engine_keeps_private() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(set(TESTS.rglob("*.py")) - VIEWS)
        for line, name in reads(ast.parse(path.read_text()))
        if name in ENGINES - OTHERS.get(path.relative_to(TESTS).as_posix(), set())
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("engine._cache", ["_cache"]),
        ("room.engine._lifecycle.requests", ["_lifecycle"]),
        ("records[0]._record = 1", ["_record"]),
        ("patched.setattr(StepTransaction, '_stage', broken)", ["_stage"]),
        ("getattr(engine, '_cache')", ["_cache"]),
        ("self._cache", []),
        ("super()._stage()", []),
        ("engine.__class__", []),
        ("setattr(step, 'commit', broken)", []),
    ],
)
def test_a_read_is_found_in_each_of_its_forms(source: str, found: list[str]) -> None:
    assert [name for _, name in reads(ast.parse(source))] == found
    assert set(found) <= ENGINES


def test_what_others_may_read_is_read() -> None:
    for file, names in OTHERS.items():
        assert names <= {name for _, name in reads(ast.parse((TESTS / file).read_text()))} & ENGINES, file
