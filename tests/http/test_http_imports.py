from __future__ import annotations

import subprocess
import sys


def test_the_front_door_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, serve_app.api;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'ray', 'torch', 'transformers'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
