"""Virtual time: a heap of future events, processes that live and die in virtual time, and a
separate random generator for each purpose, so that removing one fault leaves the rest of the run
unchanged.

A process may be killed at any point, may be paused (its events wait meanwhile), and may be
restarted. This module does not know what processes do.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from holdfast.verify.sim.simulated_disk import Crashed, MemoryDisk

#: Virtual time starts with bucket 0; clocks that are behind show times before 1970.
EPOCH_US = 0


class World:
    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.now = EPOCH_US
        self._heap: list[tuple[int, int, Process | None, int, Callable[[], None]]] = []
        self._number = 0
        self.starts = 0
        #: Events for human readers: (at, who, what, more). Formatted by `transcript`.
        self.trace: list[tuple[int, str, str, tuple[Any, ...]]] = []
        #: Called when an instance terminates itself.
        self.on_stop: Callable[[Process, BaseException], None] = lambda process, err: None

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed}/{purpose}")

    def say(self, who: str, what: str, *more: Any) -> None:
        self.trace.append((self.now, who, what, more))

    def at(self, time_us: int, fn: Callable[[], None], process: Process | None = None) -> None:
        """Calls `fn` at that time; for a process, only if the instance is still the same."""
        self._number = number = self._number + 1
        life = 0 if process is None else process.life
        if time_us < self.now:
            time_us = self.now
        heapq.heappush(self._heap, (time_us, number, process, life, fn))

    def run_until(self, end_us: int, done: Callable[[], bool] | None = None) -> bool:
        """Lets time pass until `end_us` or until `done` is true; returns whether it is."""
        heap, pop = self._heap, heapq.heappop
        checked = 0
        while heap and heap[0][0] <= end_us:
            now, _, process, life, fn = pop(heap)
            self.now = now
            if process is None:
                fn()
            elif process.life == life and process.alive:
                if process.paused:
                    process.backlog.append(fn)
                else:
                    process.enter(fn)
            if done is not None and now - checked > 100_000:
                checked = now
                if done():
                    return True
        self.now = max(self.now, end_us)
        return done is not None and done()

    def timers(self) -> dict[str, int]:
        """Number of pending timers per live process."""
        counts: dict[str, int] = {}
        for _, _, process, life, _ in self._heap:
            if process is not None and process.life == life:
                counts[process.name] = counts.get(process.name, 0) + 1
        return counts

    def transcript(self, from_us: int = 0, to_us: int = 2**62) -> str:
        """The trace as text, in seconds since the start."""
        return "".join(
            f"{(at - EPOCH_US) / 1e6:10.6f}  {who:<12} {what}"
            f"{''.join(f' {item}' for item in more)}\n"
            for at, who, what, more in self.trace
            if from_us <= at <= to_us
        )


class Process:
    """One simulated operating-system process with its own disk and clock."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.disk = MemoryDisk(world.rng(f"disk/{name}"))
        #: Increases with every start and every death; events for an earlier life are dropped.
        self.life = 0
        self.alive = False
        self.paused = False
        #: Events that arrived while the process was paused, in order.
        self.backlog: list[Callable[[], None]] = []
        #: Offset of the clock, and until when an earlier offset may have effects.
        self.offset_us = 0
        self.unsteady_until = 0
        #: The life in which the process hangs, if any.
        self.hung_in: int | None = None
        #: Address of this life; no two lives share an address.
        self.address = ""
        #: A log of this process has grown.
        self.news = False
        #: The process terminated itself and is not restarted.
        self.gave_up = False

    def disks(self) -> list[MemoryDisk]:
        """The disks that are lost when the storage of the process is deleted."""
        return [self.disk]

    def clock(self) -> int:
        """The wall clock, which may be stepped."""
        return self.world.now + self.offset_us

    @property
    def hung(self) -> bool:
        """The process answers requests but makes no progress; a restart repairs this."""
        return self.hung_in == self.life

    def monotonic(self) -> int:
        """The clock for durations, which is never stepped."""
        return self.world.now

    def after(self, delay_us: int, fn: Callable[[], None]) -> None:
        world = self.world
        world._number = number = world._number + 1
        due = world.now + delay_us if delay_us > 0 else world.now
        heapq.heappush(world._heap, (due, number, self, self.life, fn))

    def enter(self, fn: Callable[[], None]) -> None:
        """Runs `fn` in the process; the process may die in `fn`."""
        try:
            fn()
        except Crashed:
            self.die("power lost")
        except Exception as err:
            self.give_up(err)
        if self.news and self.alive:
            self.news = False
            self.enter(self.spread)

    def spread(self) -> None:
        """Notifies subscribers that a log of this process has grown."""

    def start(self) -> None:
        if self.alive or self.gave_up:
            return
        self.life += 1
        self.world.starts += 1
        self.address = f"{self.name}#{self.world.starts}"
        self.alive, self.paused, self.backlog = True, False, []
        self.world.say(self.name, "started")
        self.enter(self.boot)

    def boot(self) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """Discards everything that was only in memory."""

    def die(self, why: str, *, power: bool = False) -> None:
        """Kills the process. With `power` the machine dies too, and unsynced data may be lost."""
        if not self.alive:
            return
        self.world.say(self.name, "died:", why)
        self.life += 1
        self.alive, self.paused, self.backlog = False, False, []
        self.disk.crash(power=power or why == "power lost")
        self.forget()

    def give_up(self, err: BaseException) -> None:
        self.world.say(self.name, "terminated by", f"{type(err).__name__}: {err}")
        self.world.on_stop(self, err)
        self.gave_up = True
        self.die("unrecoverable error")

    def pause(self) -> None:
        if self.alive:
            self.world.say(self.name, "paused")
            self.paused = True

    def resume(self) -> None:
        if self.alive and self.paused:
            self.world.say(self.name, "resumed")
            self.paused = False
            waiting, self.backlog = self.backlog, []
            for fn in waiting:
                self.after(0, fn)
