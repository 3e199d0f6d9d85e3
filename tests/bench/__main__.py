"""`make bench`: how fast this is on the machine at hand, and how far from what the machine can do.

Each bench answers one question: `python -m tests.bench overlap router` runs these two, no name all but those that
take minutes or need what is not installed. Tables go to stderr; stdout has one JSON object a row, and last of each
bench one that sums it up. `--save docs/performance` keeps them, for `python -m tests.bench.page` to show.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.bench.leaving import leave_on_signals, run_to_its_end
from tests.bench.suite import BENCHES, run, save


def main() -> None:
    """Run one bench here, several in a process each: none is touched by what another leaves behind."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/NAME.json for each")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHES]
    if unknown:
        parser.error(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    leave_on_signals()
    names = options.names or [name for name, bench in BENCHES.items() if not bench.only_by_name]
    if len(names) == 1:
        _measure(names[0], options.save)
        return
    more = [] if options.save is None else ["--save", str(options.save)]
    codes = {name: run_to_its_end([sys.executable, "-m", "tests.bench", name, *more]) for name in names}
    if failed := [f"{name} (code {code})" for name, code in codes.items() if code]:
        sys.exit(f"failed: {', '.join(failed)}")


def _measure(name: str, folder: Path | None) -> None:
    result = run(name)
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}), flush=True)
    if folder is not None:
        print(f"written to {save(result, folder)}", file=sys.stderr)


if __name__ == "__main__":
    main()
