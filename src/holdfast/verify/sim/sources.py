"""A simulated source: the production `Source`, and an application that pushes rows to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from holdfast.config import Options
from holdfast.edge.dead_letters import stream_of
from holdfast.edge.source import Source
from holdfast.errors import StorageFull
from holdfast.model import operators as ops
from holdfast.types import bucket_of
from holdfast.verify.history import Accepted, Closed, History, Logged, PutAside
from holdfast.verify.sim.links import Wire
from holdfast.verify.sim.simulated_process import FOREVER, Member, Wiring, kept_for_ever
from holdfast.verify.sim.tables import Row
from holdfast.verify.sim.world import EPOCH_US, World

ROWS = 10
TIME = pa.timestamp("us", tz="UTC")
#: Number of pushes whose random values are generated at once.
_BLOCK = 32
COLUMNS = ["ts", "key", "value"]


class _Lot(NamedTuple):
    offsets: Any
    keys: Any
    values: Any
    pause: float
    chance: float


class SourceProcess(Member):
    """A source and an application that pushes a few rows in every bucket. The token of a push is
    its number, so that after a crash the application continues where the log ends."""

    def __init__(
        self,
        world: World,
        wire: Wire,
        wiring: Wiring,
        op: ops.Source,
        options: Options,
        history: History,
    ) -> None:
        super().__init__(world, op.name, wire)
        self.network, self.op, self.history = wiring.network, op, history
        self._consumers = wiring.consumers[op.name]
        self._kept_for_ever = kept_for_ever(self.network, options)
        self._buffer_buckets = options.buffer_buckets
        self._retired = False
        self._seed = list(f"{world.seed}/{self.name}".encode())
        self._block: tuple[int, Any, Any, Any, list[list[float]]] | None = None
        #: The application is stopped: no rows are pushed, and no buckets are closed.
        self.silent = False
        self.ending = False
        self._accepted = 0
        self._closed_upto: int | None = None
        #: Rows of all closed buckets: the actual input of the network.
        self.logged: list[Row] = []
        self._logged_upto = bucket_of(EPOCH_US, self.network.width_us) - 1
        self._put_aside_upto = -FOREVER

    def up(self) -> None:
        self.source = Source(
            self.op, self.log, self.network.width_us,
            clock=self.clock, monotonic=self.monotonic,
            buffer_buckets=self._buffer_buckets,
            received=lambda: self.service.received(self.name),
            say=lambda text: self.world.say(self.name, text),
        )  # fmt: skip
        self.source.start(EPOCH_US)
        self.service.logs[self.name] = self.log
        self.service.consumers[self.name] = set(self._consumers)
        self._next = int(self.source.token or 0) + 1
        self._note()
        self._plan_push()
        self._plan_tick()

    def _plan_push(self) -> None:
        """Schedules the next push at a random time around one bucket width from now. The random
        values depend on the number of the push, not on faults."""
        self._lot = self._lots(self._next)
        self.after(int(self.network.width_us * (0.6 + 0.8 * self._lot.pause)), self._push)

    def _lots(self, number: int) -> _Lot:
        """The random values of a push, generated in blocks."""
        block, place = divmod(number, _BLOCK)
        if self._block is None or self._block[0] != block:
            draw = np.random.default_rng([*self._seed, block])
            offsets = draw.integers(-400_000, 200_000, (_BLOCK, ROWS))
            keys = pa.array(draw.integers(0, 4, _BLOCK * ROWS))
            first = block * _BLOCK * ROWS
            values = pa.array(np.arange(first, first + _BLOCK * ROWS))
            self._block = (block, offsets, keys, values, draw.random((_BLOCK, 2)).tolist())
        _, offsets, keys, values, chances = self._block
        at = place * ROWS
        return _Lot(offsets[place], keys.slice(at, ROWS), values.slice(at, ROWS), *chances[place])

    def _push(self) -> None:
        if self.ending:
            return
        if self.silent:
            self.after(self.network.width_us, self._push)
            return
        draw, number = self._lot, self._next
        times = pa.Array.from_buffers(TIME, ROWS, [None, pa.py_buffer(self.clock() + draw.offsets)])
        rows = pa.Table.from_arrays([times, draw.keys, draw.values], COLUMNS)
        try:
            self.source.push(rows, token=str(number), flush=draw.chance < 0.1)
        except StorageFull as err:
            self.after(err.retry_us, self._push)
            return
        self._next += 1
        self._note()
        self._plan_push()

    def _plan_tick(self) -> None:
        self.after(self.source.due_in_us(), self._tick)

    def _tick(self) -> None:
        if not self.silent:
            try:
                if self._retired:
                    self.source.retire("the scenario retires the source")
                elif self.ending:
                    self.source.end()
                else:
                    self.source.tick()
            except StorageFull as err:
                self._note()
                self.after(err.retry_us, self._tick)
                return
            self._note()
            if self._logged_upto % 4 == 0:
                self.note_held([self.name], self._kept_for_ever)
        if self.silent or not self.ending:
            self._plan_tick()

    def retire(self) -> None:
        """An operator decides that the application never returns."""
        self.silent, self._retired = False, True
        self.finish()

    def finish(self) -> None:
        """The application is done: all buckets are closed and the stream ends."""
        self.ending = True
        if self.is_up:
            self.after(0, self._tick)

    def _note(self) -> None:
        """Records the rows that the application knows to be durable, and the closed buckets."""
        token = int(self.source.token or 0)
        if token > self._accepted:
            values = range((self._accepted + 1) * ROWS, (token + 1) * ROWS)
            self._accepted = token
            self.history.add(Accepted(self.world.now, self.name, tuple((v,) for v in values)))
        info = self.log.info(self.name)
        for segment in self.log.segments(self.name, self._logged_upto + 1, info.complete_upto):
            rows = self.log.read(segment).rows
            self.logged += rows
            logged = Logged(
                self.world.now, self.name, segment.id.bucket, tuple((row[2],) for row in rows)
            )
            self.history.add(logged)
        self._logged_upto = info.complete_upto
        self._note_dead_letters()
        upto = FOREVER if info.ended else info.complete_upto
        if upto != self._closed_upto:
            self._closed_upto = upto
            self.history.add(Closed(self.world.now, self.name, upto))
            self.world.say(
                self.name, "closed up to bucket", info.complete_upto, "ended" if info.ended else ""
            )

    def _note_dead_letters(self) -> None:
        stream = stream_of(self.name)
        if not self.log.has(stream):
            return
        for segment in self.log.segments(stream, self._put_aside_upto + 1, FOREVER):
            rows = tuple((row[-1],) for row in self.log.read(segment).rows)
            self.history.add(PutAside(self.world.now, self.name, rows))
            self._put_aside_upto = segment.id.bucket

    @property
    def ended(self) -> bool:
        return self._closed_upto == FOREVER
