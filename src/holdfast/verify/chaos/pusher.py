"""Pusher of generated rows into the sources, in real time.

At the end of every bucket, the pusher pushes the rows of the bucket and then advances the source.
The rows depend only on the seed, the bucket and the source. When a silenced source resumes, the
buckets of its silence close empty.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from holdfast.clock import now_us
from holdfast.edge.source import Source
from holdfast.types import bucket_of
from holdfast.verify.chaos.deployed_networks import KEYS
from holdfast.verify.chaos.recorder import Recorder
from holdfast.verify.history import Accepted, Closed, Row, Stopped

ROWS = 20
#: Margin added to the wait for the end of a bucket, because timers can fire early. In seconds.
_AFTER_S = 0.002


class Pusher:
    def __init__(self, sources: Mapping[str, Source], width_us: int, recorder: Recorder) -> None:
        self._sources, self._width_us, self._recorder = sources, width_us, recorder
        self._seed = 0
        #: The first bucket not pushed yet, by source; empty while the pusher rests.
        self._next: dict[str, int] = {}
        self._silent: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pusher", daemon=True)
        self._thread.start()

    def begin(self, first: int, seed: int) -> None:
        """Push rows from bucket `first` on. Unpushed earlier buckets close empty."""
        with self._lock:
            self._next = dict.fromkeys(self._sources, first)
            self._silent.clear()
            self._seed = seed

    def rest(self) -> int:
        """Push the finished buckets, then pause. Returns the last bucket closed by all sources."""
        with self._lock:
            self._tick(now_us())
            self._next = {}
        return min(source.log.info(name).complete_upto for name, source in self._sources.items())

    def silence(self, source: str) -> None:
        with self._lock:
            self._silent.add(source)

    def speak(self, source: str) -> None:
        with self._lock:
            self._silent.discard(source)
            if source in self._next:
                self._next[source] = bucket_of(now_us(), self._width_us)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            now = now_us()
            wait_us = self._width_us - now % self._width_us
            if self._stop.wait(wait_us / 1e6 + _AFTER_S):
                return
            try:
                with self._lock:
                    self._tick(now_us())
            except Exception as err:
                self._recorder.add(Stopped(now_us(), "pusher", "ours", str(err)))
                raise

    def _tick(self, now: int) -> None:
        open_bucket = bucket_of(now, self._width_us)
        for number, (name, source) in enumerate(self._sources.items()):
            if name in self._silent or self._next.get(name, open_bucket) >= open_bucket:
                continue
            accepted: list[Row] = []
            for bucket in range(self._next[name], open_bucket):
                rows = self._rows(bucket, number)
                source.push(rows)
                accepted += zip(*(column.tolist() for column in rows.values()), strict=True)
            source.advance(open_bucket * self._width_us)
            self._next[name] = open_bucket
            self._recorder.add(Accepted(now_us(), name, tuple(accepted)))
            self._recorder.add(Closed(now_us(), name, open_bucket - 1))

    def _rows(self, bucket: int, number: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self._seed, bucket, number])
        ids = (bucket * ROWS + np.arange(ROWS)) * len(self._sources) + number
        since = bucket * self._width_us
        return {
            "ts": np.sort(rng.integers(since, since + self._width_us, ROWS)),
            "id": ids,
            "key": rng.integers(0, KEYS, ROWS),
            "x": rng.integers(0, 1_000, ROWS),
        }
