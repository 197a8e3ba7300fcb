"""The compiler of the native kernels. Found without torch, so that a start can tell at once that there is none."""

from __future__ import annotations

import os
import shutil


class BuildError(Exception):
    """Why there is no native library; the text is meant for the user."""


def find_compiler() -> str:
    """The path of $CXX, else of the first of g++, c++ and clang++. Raises BuildError."""
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "c++", "clang++"]:
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(
        f"CXX={chosen!r} is no program" if chosen else "no C++ compiler (g++, c++ or clang++) found; install one"
    )
