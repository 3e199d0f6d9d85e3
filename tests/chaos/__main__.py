"""`make chaos`: long runs of what may go wrong. ARGS name the parts to run; without any, all of them run.

`matrix:tcp,tls` is the part `matrix` over these transports alone, `matrix:shm,mixture` over that one with this model,
`planted:dense` the part `planted` with that one. The models are dense, w8a8 and mixture.

Each part is a module of this folder with a function `run`, which yields results and raises AssertionError when Baton
has failed. Results are JSON lines on stdout. The exit code is 1 when a part has failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import traceback

PARTS = ("corruption", "races", "matrix", "planted", "churn", "soak")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    words = parser.parse_args().parts or PARTS
    parts = [re.split("[:,]", word) for word in words]
    for unknown in {name for name, *_ in parts} - set(PARTS):
        parser.error(f"there is no part {unknown!r}, only {', '.join(PARTS)}")
    failed = []
    for name, *arguments in parts:
        print(f"== {name}", file=sys.stderr)
        try:
            for result in importlib.import_module(f"tests.chaos.{name}").run(*arguments):
                print(json.dumps({"part": name, **result}), flush=True)
        except AssertionError:
            traceback.print_exc()
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
