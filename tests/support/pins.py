"""The versions that are installed here of all that Moorage needs, as a constraints file for pip.

    make constraints      (python -m tests.support.pins > cluster_configs/constraints.txt)

after the suite has passed. Only versions as they are published: the local part of a build (`+cpu`) is left out, so that
`torch==2.13.0` is met by each of its builds.
"""

from __future__ import annotations

import importlib.metadata
import platform
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def direct_requirements() -> list[Requirement]:
    """Of Moorage and of its tests."""
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    return [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["test"]]]


def pins() -> dict[str, str]:
    """Name to version, of the direct requirements and of all that these need on this machine."""
    found: dict[str, str] = {}
    waiting = [requirement for requirement in direct_requirements() if _holds(requirement, "")]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        package = importlib.metadata.distribution(name)
        found[name] = Version(package.version).public
        needed = [Requirement(text) for text in package.requires or ()]
        waiting += [item for item in needed if any(_holds(item, extra) for extra in ("", *requirement.extras))]
    return found


def _holds(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def main() -> None:
    print(f"# What the suite has passed with, on Python {platform.python_version()}: made by `make constraints`.")
    for name, version in sorted(pins().items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
