"""`router`: its commands, signals and exit codes. `router plan` is in `planner`.

Exit code 0 after SIGTERM or Ctrl-C, 1 when the service could not start or broke, 2 for a wrong flag or model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from router.config import RouterConfig
from router.flags import build_parser, router_config
from shared import log
from shared.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a router until it is told to stop, or plan a fleet (`router plan`)."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if flags[:1] == ["plan"]:
        # The planner drives nodes and loads torch, so it replaces this process: signals and exit code are its own.
        os.execv(sys.executable, [sys.executable, "-m", "planner", *flags])
    args = build_parser().parse_args(flags)
    import uvloop  # what serves is imported when it is needed: --help does not wait for it

    log.setup(args.log_level, "router")
    try:
        return uvloop.run(_run(router_config(args), flags))
    except ConfigError as e:
        print(f"router: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0  # before the loop could take the signal


async def _run(config: RouterConfig, flags: Sequence[str]) -> int:
    from router.processes.child_process import ChildFailed
    from router.processes.stopping import stop_on_signals, unless
    from router.processes.supervisor import Supervisor

    supervisor = Supervisor(config, flags)
    stop = stop_on_signals(supervisor.kill)
    code = 0
    async with supervisor:
        try:
            if await unless(stop, supervisor.start()):
                await unless(stop, supervisor.broken())
        except ChildFailed as failed:
            code = 2 if failed.code == 2 else 1
        if sys.stdout.isatty():
            print("\nstopping ...", flush=True)
    log.event("router_stopped")
    return code


if __name__ == "__main__":
    sys.exit(main())
