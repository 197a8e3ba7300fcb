"""Values of the configuration that are more than a number: memory, API keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_memory(value: object) -> float:
    """A share of memory in (0, 1], or bytes > 1, from 0.3, "0.3", 2147483648, "2GiB" or "512 MB"."""
    rule = 'a share such as 0.3, or bytes such as "2GiB"'
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be {rule}, not {value!r}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"must be {rule}, not {value!r}")
    amount = float(match[1]) * _UNITS[match[2].upper()]
    if not 0 < amount <= 2**50 or (match[2] and amount <= 1):
        raise ValueError(f"must be {rule}, not {value!r}")
    return amount


Memory = Annotated[float, BeforeValidator(parse_memory)]


def keys_of_file(path: Path) -> list[str]:
    """API keys, one a line. Raises ValueError."""
    try:
        lines = path.expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_key_file {str(path)!r} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise ValueError(f"api_key_file {str(path)!r} holds no key")
    return keys


def check_key(key: str) -> None:
    """A header must carry it: printable ASCII without spaces. Raises ValueError."""
    if not re.fullmatch(r"[!-~]{8,512}", key):
        raise ValueError("an API key must be 8 to 512 printable ASCII characters without spaces")
