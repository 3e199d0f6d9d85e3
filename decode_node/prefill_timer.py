"""How fast this node prefills, measured where its loop hears that a forward is done."""

from __future__ import annotations

from shared.scheduling.retract_costs import MovingRate
from shared.scheduling.schedule_batch import ScheduleBatch
from shared.timeline import Clock


class PrefillTimer:
    """Takes the time from turn to turn. A forward begins when it is launched, or when the one before it is done."""

    def __init__(self, rate: MovingRate, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._turn_began = self._in_flight_began = clock()

    def turn_begins(self) -> None:
        """A forward is about to be launched, if there is one."""
        self._turn_began = self._clock()

    def turn_ended(self, launched: ScheduleBatch | None, done: ScheduleBatch | None) -> None:
        """`done` was accounted for, `launched` went to the stream before; they are the same without overlap."""
        now = self._clock()
        if done is not None and any(item.start < item.req.num_input_ids for item in done.extends):
            began = self._turn_began if done is launched else self._in_flight_began
            self._rate.observe(done.num_tokens, now - began)
        self._in_flight_began = self._turn_began if done is None else now
