"""`python -m planner autoscale`: it watches a router's fleet. The router starts it (--autoscale).

Exit code 0 after SIGTERM or Ctrl-C, 1 when the router refuses the key, 2 for a wrong flag or profile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from planner.autoscaler.capacity import Capacity
from planner.autoscaler.decision import Autoscaler, NodeBounds, Pace
from planner.autoscaler.fleet_client import FleetClient
from planner.autoscaler.scaling_actions import Command, Printer, ScalingActions, Webhook
from planner.autoscaler.watch import Watch
from planner.figures import Slo
from planner.profile import load_plan_profiles
from router.http.config import AutoscaleOptions, PlanOptions
from router.processes.child_process import LOADED, READY
from router.processes.stopping import stop_on_signals, unless
from router.terminal.client import ClientError, RouterClient
from shared import cli, log
from shared.errors import ConfigError
from shared.flags import FlagParser, add_flags, options_of
from shared.protocol.messages import Role

KEY_VARIABLE = "BATON_ADMIN_API_KEY"
_STDIN = 0


def main(argv: Sequence[str]) -> int:
    """Watch a router's fleet until it is told to stop."""
    parser = cli.make_parser("python -m planner autoscale", "Change the number of nodes of a running fleet.")
    add_flags(parser, "planner", PlanOptions)
    add_flags(parser, "autoscaler", AutoscaleOptions)
    _add_own_flags(parser)
    args = parser.parse_args(argv)
    log.setup(args.log_level, "autoscaler")
    key = os.environ.get(KEY_VARIABLE)
    if args.exit_with_parent:
        key = sys.stdin.readline().strip() or None
    try:
        plan, options = options_of(PlanOptions, args), options_of(AutoscaleOptions, args)
        plan.check()
        options.check()
        autoscalers = autoscalers_of(plan, options, frozenset(args.keep))
        actions = _scaling_actions(options, args.url, args.control)
    except ConfigError as error:
        print(f"autoscaler: error: {error}", file=sys.stderr)
        return 2
    watch = Watch(
        FleetClient(RouterClient(args.url, key, Path(args.certificate) if args.certificate else None)),
        autoscalers,
        actions,
        drain_timeout_s=options.autoscale_drain_timeout_s,
    )
    if args.exit_with_parent:
        os.write(_STDIN, LOADED + READY)
        threading.Thread(target=_watch_parent, args=(actions,), name="parent", daemon=True).start()
    for autoscaler in autoscalers:
        bounds, pace = autoscaler.bounds, autoscaler.pace
        log.event("autoscaler_started", role=autoscaler.role, least=bounds.least, most=bounds.most, url=args.url,
                  first_node_wait_s=pace.start_limit_s)  # fmt: skip
    # Not asyncio.run, which waits for threads: a call to the router may last as long as a drain takes.
    os._exit(asyncio.Runner().run(_run(watch, actions)))


def autoscalers_of(plan: PlanOptions, options: AutoscaleOptions, keep: frozenset[str]) -> list[Autoscaler]:
    """One for each role of `options`; both have been checked. Raises ConfigError."""
    if not options.autoscale:
        raise ConfigError("it needs --autoscale")
    if plan.plan_profile is None or plan.slo_ttft_ms is None or plan.slo_itl_ms is None:
        raise ConfigError("it needs --plan-profile, --slo-ttft-ms and --slo-itl-ms")
    slo = Slo(ttft_s=plan.slo_ttft_ms / 1e3, itl_s=plan.slo_itl_ms / 1e3)
    profiles = dict(zip((Role.PREFILL, Role.DECODE), load_plan_profiles(plan), strict=True))
    autoscalers = []
    for scaled in options.autoscale:
        profile = profiles[scaled.role]
        pace = Pace(
            start_s=profile.node.start_s,
            settle_s=options.autoscale_settle_s,
            window_s=options.autoscale_window_s,
            interval_s=options.autoscale_interval_s,
        )
        bounds, capacity = NodeBounds(scaled.least, scaled.most), Capacity(profile, slo, plan.good_share)
        autoscalers.append(Autoscaler(scaled.role, bounds, pace, capacity, keep))
    return autoscalers


def _scaling_actions(options: AutoscaleOptions, url: str, control: str) -> ScalingActions:
    if options.autoscale_command is not None:
        environment = {"BATON_ROUTER_URL": url, "BATON_CONTROL_ADDRESS": control}
        return Command(options.autoscale_command, options.autoscale_timeout_s, environment)
    if options.autoscale_webhook is not None:
        return Webhook(options.autoscale_webhook, options.autoscale_timeout_s)
    return Printer()


def _add_own_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("the router")
    for flag, metavar, default, words in (
        ("--url", "URL", "http://127.0.0.1:8000", f"its URL; ${KEY_VARIABLE} has the admin key"),
        ("--certificate", "FILE", None, "what the router must show over HTTPS, in PEM"),
        ("--control", "HOST:PORT", "", "where nodes announce themselves to it, for --autoscale-command"),
    ):
        group.add_argument(flag, metavar=metavar, default=default, help=words)
    group.add_argument(
        "--keep", action="append", default=[], metavar="NODE_ID", help="a node never to drain; may repeat"
    )
    group.add_argument(
        "--exit-with-parent",
        action="store_true",
        help="read the key from the first line of standard input, and end when that closes",
    )
    cli.add_log_flags(parser)


async def _run(watch: Watch, actions: ScalingActions) -> int:
    stop = stop_on_signals(lambda: _end(actions, 1))
    try:
        await unless(stop, watch.run())
    except ClientError as error:
        log.warn("router_refuses", reason=error)
        return 1
    finally:
        watch.close()
    log.event("autoscaler_stopped")
    return 0


def _watch_parent(actions: ScalingActions) -> None:
    """End at once when the router is gone, and the operator's command with it."""
    while os.read(_STDIN, 4096):
        pass
    log.event("supervisor_gone")
    _end(actions, 1)


def _end(actions: ScalingActions, code: int) -> None:
    actions.close()
    os._exit(code)
