"""`make chaos`: long runs of what may go wrong. ARGS name the parts to run; without any, all of them run.

Each part is a module of this folder with a function `run`, which yields results and raises AssertionError when Baton
has failed. Results are JSON lines on stdout. The exit code is 1 when a part has failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback

PARTS = ("corruption", "races", "matrix", "planted", "churn", "abort_storm", "soak")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    names = parser.parse_args().parts or PARTS
    for unknown in set(names) - set(PARTS):
        parser.error(f"there is no part {unknown!r}, only {', '.join(PARTS)}")
    failed = []
    for name in names:
        print(f"== {name}", file=sys.stderr)
        try:
            for result in importlib.import_module(f"tests.chaos.{name}").run():
                print(json.dumps({"part": name, **result}), flush=True)
        except AssertionError:
            traceback.print_exc()
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
