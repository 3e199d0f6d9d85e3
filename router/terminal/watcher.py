"""Follows a router's live feed on a thread of its own, across restarts of the router."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import closing

import msgspec

from router.api.live_feed import MAX_SAMPLES, LiveEvent, Sample
from router.terminal.client import ClientError, Refused, RouterClient

_RETRY_S = 1.0
_SILENCE_S = 10.0
_NEVER_BETTER = (401, 403, 404)


class Watcher(threading.Thread):
    """`news` is set whenever there is something new to show; `refusal` once trying again is pointless.

    Written by the thread, read by others: each attribute is replaced as a whole.
    """

    def __init__(self, client: RouterClient) -> None:
        super().__init__(name="live feed", daemon=True)
        self._client = client
        self._stopped = threading.Event()
        self.news = threading.Event()
        self.latest: LiveEvent | None = None
        self.samples: tuple[Sample, ...] = ()
        self.trouble = "connecting"
        self.refusal: Refused | None = None

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopped.is_set():
            try:
                self._follow()
                self.trouble = "the router has stopped"
            except Refused as e:
                if e.status in _NEVER_BETTER:
                    self.refusal = e
                    self.news.set()
                    return
                self.trouble = str(e)
            except ClientError as e:
                self.trouble = str(e)
            self.news.set()
            self._stopped.wait(_RETRY_S)

    def stop(self) -> None:
        """End soon: at the next event."""
        self._stopped.set()

    def _follow(self) -> None:
        samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        decoder = msgspec.json.Decoder(LiveEvent)
        with closing(self._client.events("/live", silence_s=_SILENCE_S)) as payloads:
            for payload in payloads:
                try:
                    event = decoder.decode(payload)
                except msgspec.DecodeError as e:
                    raise ClientError(f"{self._client.url} is another version of Baton: {e}") from e
                samples += event.samples
                self.latest, self.samples, self.trouble = event, tuple(samples), ""
                self.news.set()
                if self._stopped.is_set():
                    return
