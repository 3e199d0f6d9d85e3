from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, resource, sys
from router.http.http_server import room_for
resource.setrlimit(resource.RLIMIT_NOFILE, (600, 2000))
rooms = [(room_for(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)) for wanted in (1000, 8192)]
print(json.dumps(rooms))
"""


def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows() -> None:
    """In a process of its own, which cannot take a hard limit back either."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    enough, limited = json.loads(ran.stdout)
    assert enough == [1000, [2000, 2000]]
    assert limited == [1488, [2000, 2000]]
    assert "max_connections_limited asked=8192 possible=1488 open_files_limit=2000" in ran.stderr
