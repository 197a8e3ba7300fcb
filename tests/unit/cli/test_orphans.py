"""A command finds its descendants again, whoever started them."""

from __future__ import annotations

import subprocess
import sys

import psutil

# In a process of its own: to adopt orphans is a property of the process.
SCRIPT = """
import subprocess, sys, psutil
from serve_app.commands.orphans import adopt_orphans, kill_descendants, reap_adopted

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
PARENT = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"

def orphan():
    return int(subprocess.run([sys.executable, "-c", PARENT, *SLEEP], stdout=subprocess.PIPE, check=True).stdout)

def children():
    return {child.pid for child in psutil.Process().children()}

adopt_orphans()
first, second, own = orphan(), orphan(), subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
assert {first, second} < children()
psutil.Process(first).kill()
ended = {first, own.pid}
while any(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in ended):
    pass
reap_adopted({own.pid})
assert children() == {second, own.pid}
assert own.wait() == 7
kill_descendants(10.0)
assert not children()
print(first, second)
"""


def test_orphans_are_adopted_reaped_and_ended_and_a_childs_exit_code_is_left_to_its_starter() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())
