"""When a peer that answers no pings counts as silent: the same between nodes, and for a router and its nodes."""

from __future__ import annotations


class Heartbeat:
    """Decides when to ping one peer, and when it counts as silent. `now` is passed in.

    Silence is measured from pings that went unanswered and not from the wall clock alone: a process that was
    itself asleep (a long step, SIGSTOP, a suspended machine) wakes to a backlog of answers, and must not call the
    peer silent before it has read them.
    """

    MIN_UNANSWERED = 2

    def __init__(self, ping_s: float, timeout_s: float, now: float) -> None:
        self._ping_s = ping_s
        self._timeout_s = timeout_s
        self._heard_at = now
        self._ping_at = now
        self._num_unanswered = 0

    def heard(self, now: float) -> None:
        """Note a message of the peer: any proves that its Python is alive."""
        self._heard_at = now
        self._num_unanswered = 0

    def silence(self, now: float) -> float:
        """Seconds since the peer was last heard."""
        return now - self._heard_at

    def ping_due(self, now: float) -> bool:
        """Whether to send a ping now; counts it as sent."""
        if now < self._ping_at:
            return False
        self.pinged(now)
        return True

    def pinged(self, now: float) -> None:
        """Count a ping as sent. For a caller with a timer of its own, which may be early."""
        self._ping_at = now + self._ping_s
        self._num_unanswered += 1

    def silent(self, now: float) -> bool:
        """Whether the peer counts as silent, which is when the next ping would come after the timeout.

        Call this before `ping_due` or `pinged`. The last ping has had half of its interval, at least.
        """
        return (
            now >= self._ping_at - self._ping_s / 2
            and self._num_unanswered >= self.MIN_UNANSWERED
            and self.silence(now) + self._ping_s > self._timeout_s
        )
