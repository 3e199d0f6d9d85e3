"""Shows how far the nodes have loaded: bars in a terminal, else a line for each step."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shared.protocol.messages import Announcement, Join, LoadFailed, Loading


class LoadProgress:
    """A context manager around the time of loading; `on_announcement` is a `join_socket.JoinListener`."""

    def __init__(self, console: Console, node_ids: list[str]) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.fields[node_id]:<12}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%  {task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}
        self._is_shown = console.is_terminal and bool(node_ids)
        if self._is_shown:
            for node_id in node_ids:
                self._tasks[node_id] = self._progress.add_task("starting", node_id=node_id, total=1.0)

    def __enter__(self) -> LoadProgress:
        """Show the bars."""
        if self._is_shown:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bars."""
        if self._is_shown:
            self._progress.stop()

    def on_announcement(self, message: Announcement) -> None:
        """Show that a node loads, is ready, or could not start."""
        match message:
            case Loading(node_id, _, what, fraction):
                self._show(node_id, what, fraction)
            case Join(node):
                self._show(node.node_id, "ready", 1.0)
            case LoadFailed(node_id, _, reason):
                self._show(node_id, f"failed: {reason}", 1.0)

    def _show(self, node_id: str, what: str, fraction: float) -> None:
        if node_id in self._tasks:
            self._progress.update(self._tasks[node_id], completed=fraction, description=what)
        elif not self._console.is_terminal and self._said.get(node_id) != what:
            self._said[node_id] = what  # one line for each step of loading, not for each fraction
            self._console.print(f"{node_id}: {what}", markup=False, highlight=False)
