"""Scenarios that each show many planted bugs: short, with one kind of fault at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from holdfast.config import Options
from holdfast.model.network import Network
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.networks import NETWORKS
from holdfast.verify.sim.simulation import Outcome, Simulation
from tests.verify.sim.lab import group_steps, union_of_two
from tests.verify.sim.mutations.stage import (
    Tweak,
    damage_a_piece,
    delaying,
    eventual_chain,
    failing,
    few_entries,
    flip_a_row,
    flushing_for,
    full_from_the_start,
    full_while_flushing,
    long_correction,
    one_replica,
    picky,
    rot_manifest,
    row_of_two,
    suspending,
    tell_time,
    three_fragments,
    torn_while_flushing,
    two_replicas,
    undoing,
)

S = 1_000_000
#: Trims early, and restarts from checkpoints.
CHECKPOINTS = Options(recovery="checkpoint", checkpoint_buckets=3)
REPLAY = Options(recovery="replay", checkpoint_buckets=3)
#: For pairs: one replica is enough to continue.
PAIRS = Options(recovery="checkpoint", checkpoint_buckets=7)
#: A node dies again before it has replayed its input, or soon after.
RESTARTS = (
    (2, 0.2), (3.3, 0.5), (3.9, 0.3), (4.8, 0.3), (6.1, 0.2), (8.1, 0.5), (8.7, 0.3), (9.3, 0.5),
    (11.3, 0.5),
)  # fmt: skip
NO_CHECKPOINTS = Options(recovery="replay", checkpoint_buckets=0)


def at(s: float, do: str, on: str, for_s: float, value: float = 0.0) -> Fault:
    return Fault(int(s * S), do, on, int(for_s * S), value)


@dataclass(frozen=True)
class Scene:
    on: str | Callable[[], Network]
    seconds: float
    faults: tuple[Fault, ...]
    options: Options | None = None
    #: Seed of random values, and of the options if none are given.
    options_seed: int = 0
    #: Changes that no fault of a scenario can make.
    tweak: Tweak | None = None
    #: Checkers that fail without any mistake, because rows are damaged on purpose.
    also: frozenset[str] = frozenset()

    @property
    def is_long(self) -> bool:
        """Too long for every commit: pairs have many nodes."""
        return str(self.on).startswith("pairs-") and self not in _SHORT

    def run(self, patch: pytest.MonkeyPatch) -> Outcome:
        name = self.on
        if not isinstance(name, str):
            patch.setitem(NETWORKS, "lab", name)
            name = "lab"
        sim = Simulation(
            Scenario("planted", name, self.seconds, self.faults, self.options_seed), self.options
        )
        if self.tweak is not None:
            self.tweak(sim)
        return sim.run()


SCENES = {
    "kills": Scene(
        "chain",
        14,
        (
            at(3, "kill", "first", 0.5),
            at(4.5, "kill", "second", 0.5),
            at(6, "kill", "client-windows", 0.4),
            at(7, "kill", "s1", 0.4),
            at(8, "kill", "first", 0.1),
            at(8.1, "kill", "second", 0.1),
        ),
        CHECKPOINTS,
    ),
    "wipes": Scene(
        "chain",
        12,
        (
            at(3, "wipe", "first", 0.5),
            at(5, "wipe", "second", 0.5),
            at(7, "wipe", "first", 0.2),
            at(7.2, "kill", "client-windows", 0.4),
        ),
        REPLAY,
    ),
    "torn_nodes": Scene(
        "single",
        18,
        tuple(at(2 + 1.25 * n, "torn", "main", 0.4, float(n)) for n in range(1, 12)),
        CHECKPOINTS,
    ),
    "torn_sources": Scene(
        "single",
        18,
        tuple(at(2 + 1.2 * n, "torn", f"s{1 + n % 2}", 0.4, float(n)) for n in range(1, 12)),
        CHECKPOINTS,
    ),
    "full": Scene(
        "chain",
        16,
        (
            at(2.3, "full", "s1", 0.8),
            at(4, "full", "first", 1.2),
            at(6, "full", "second", 1.2),
            at(8, "full", "client-windows", 1.2),
            at(4.7, "kill", "s1", 0.3),
        ),
        CHECKPOINTS,
    ),
    "links": Scene(
        "chain",
        14,
        (
            at(2, "damage", "s1,s2->first", 2),
            at(3, "damage", "second->client-totals", 2),
            at(4, "repeat", "first,second->s1,s2,first", 3),
            at(5, "reset", "first<->second", 0),
            at(6, "delay", "s1->first", 1, 400.0),
            at(7, "cut", "first->second", 1),
        ),
        CHECKPOINTS,
    ),
    "silent": Scene("line", 12, (at(3.1, "silent", "s1", 5),), CHECKPOINTS),
    "failure": Scene("pair", 16, (at(3, "silent", "s2", 6),), REPLAY),
    "failure_cut": Scene("pair", 16, (at(3, "cut", "s2<->main,main@2", 6),), REPLAY),
    "replica_down": Scene(
        "pair",
        16,
        (at(3, "kill", "main@2", 0.5), at(6, "kill", "main", 6)),
        REPLAY,
    ),
    "replica_hangs": Scene("pair", 16, (at(3, "hang", "main", 6),), REPLAY),
    "row": Scene(row_of_two, 18, (at(3, "silent", "s2", 5), at(11, "silent", "s3", 3)), REPLAY),
    "row_replicas": Scene(
        row_of_two,
        18,
        (at(3, "silent", "s2", 8), at(5, "kill", "upper", 3), at(8.5, "kill", "lower@2", 1)),
        REPLAY,
    ),
    "suspending": Scene(suspending, 20, (at(3, "silent", "s2", 8),), REPLAY),
    "undoing": Scene(
        undoing, 16, (at(3, "silent", "s2", 4), at(11, "kill", "main", 0.4)), NO_CHECKPOINTS
    ),
    "undoing_reader": Scene(
        undoing, 24, (at(3, "silent", "s2", 5), at(4, "kill", "client-windows", 8)), NO_CHECKPOINTS
    ),
    "pairs_calm": Scene("pairs-1", 14, (), PAIRS),
    "pairs_wipe": Scene("pairs-1", 18, (at(4, "wipe", "lower.0", 1),), PAIRS),
    "pairs_kill": Scene("pairs-1", 18, (at(4, "kill", "lower.0", 4),), PAIRS),
    "pairs_dead": Scene(
        "pairs-1",
        36,
        (at(3, "wipe", "lower.0@2", 32),),
        Options(recovery="checkpoint", checkpoint_buckets=1, rejoin="2s"),
    ),
    "pairs_bound": Scene(
        "pairs-1", 28, (at(3, "wipe", "lower.0@2", 22),), replace(PAIRS, buffer_buckets=24)
    ),
    "pairs_hang": Scene("pairs-1", 24, (at(4, "hang", "lower.0", 12),), replace(PAIRS, stall="4s")),
    "pairs_fetcher_dies": Scene(
        "pairs-1",
        46,
        (
            at(4, "delay", "lower.0@2<->lower.0", 8, 900.0),
            at(5, "wipe", "lower.0", 1),
            at(9, "kill", "lower.0", 36),
        ),
        Options(recovery="checkpoint", checkpoint_buckets=1, rejoin="2s"),
    ),
    "pairs_lender_dies": Scene(
        "pairs-1",
        30,
        (
            at(6, "delay", "lower.0@2<->lower.0", 12, 700.0),
            at(7, "kill", "lower.0", 1),
            at(13, "kill", "lower.0@2", 1),
        ),
        PAIRS,
    ),
    "pairs_one_disk": Scene(
        "pairs-1", 30, (at(10, "kill", "lower.0", 4), at(11.5, "wipe", "lower.0@2", 1)), PAIRS
    ),
    "hosts_lost": Scene(
        "pairs-hosts-2",
        22,
        (at(3, "wipe", "host-1", 17), at(9, "kill", "controller", 0.5)),
        PAIRS,
    ),
    "hosts_pause": Scene("pairs-hosts-2", 16, (at(3, "pause", "host-1", 5),), PAIRS),
    "eio": Scene(
        "pair", 30, (at(3, "eio-fsync", "main@2", 10), at(14, "kill", "main", 14)), REPLAY
    ),
    "glitches": Scene(
        "pair",
        22,
        (at(3, "skew", "s1", 0.6, 3_600_000.0), at(14, "skew", "s1", 0.6, 3_600_000.0)),
        REPLAY,
    ),
    "client_restarts": Scene(
        "pair",
        16,
        (
            at(3, "silent", "s2", 8),
            at(6, "kill", "client-windows", 0.4),
            at(8, "kill", "client-totals", 0.4),
        ),
        REPLAY,
    ),
    "fan_readers": Scene(
        "fan",
        14,
        (at(0, "kill", "left", 5), at(0, "kill", "right", 6), at(8, "kill", "middle", 3)),
        CHECKPOINTS,
    ),
    "source_full": Scene(
        "single",
        16,
        tuple(at(2 + 2 * n, "full", f"s{1 + n % 2}", 1.5) for n in range(6)),
        CHECKPOINTS,
    ),
    "full_backlog": Scene(
        "chain", 16, (at(3, "cut", "s1,s2->first", 3), at(6, "full", "first", 3)), CHECKPOINTS
    ),
    "pairs_alone": Scene("pairs-1", 40, (at(3, "wipe", "lower.0@2", 33),), NO_CHECKPOINTS),
    "correction": Scene(
        two_replicas,
        32,
        (at(3, "cut", "s2<->main,main@2", 16),),
        Options(group_buckets_max=8),
        tweak=long_correction(),
    ),
    "correction_struck": Scene(
        two_replicas,
        32,
        (at(3, "cut", "s2<->main,main@2", 16),),
        Options(group_buckets_max=8),
        tweak=long_correction((21, "kill", 10)),
    ),
    "correction_stuck": Scene(
        two_replicas,
        38,
        (at(3, "cut", "s2<->main,main@2", 8), at(12.1, "full", "main", 22)),
        tweak=group_steps(50_000),
    ),
    "restarts_cut_off": Scene(
        two_replicas,
        26,
        (
            at(8, "cut", "s2<->main,main@2", 16),
            at(11, "kill", "main", 0.5),
            at(13.5, "kill", "main@2", 0.5),
        ),
        Options(checkpoint_buckets=5),
    ),
    "budget": Scene(
        three_fragments,
        30,
        (at(3, "skew", "s2", 24, -2_000.0), at(12, "kill", "right", 14)),
        tweak=group_steps(3_000),
    ),
    "behind": Scene(
        lambda: union_of_two(2, "100ms", "3s"),
        20,
        (at(2, "delay", "s2<->main@2", 17, 500.0), at(3, "cut", "s2<->main", 15)),
        tweak=group_steps(5_000),
    ),
    "picky": Scene(picky, 14, (at(3, "cut", "s2<->main", 5),), REPLAY),
    "delaying": Scene(delaying, 16, (at(3, "silent", "s2", 10),), REPLAY),
    "failure_torn": Scene(
        one_replica,
        18,
        (
            at(3, "cut", "s2<->main", 10),
            *(at(5.3 + 1.3 * n, "torn", "main", 0.3, float(n)) for n in range(1, 5)),
        ),
        Options(checkpoint_buckets=3),
    ),
    "torn_client": Scene(
        "diamond", 5.5, (at(2.28, "torn", "client-bottom", 2.25, 3.0),), options_seed=386
    ),
    "torn_client_first": Scene(
        "fan", 8.2, (at(4.921, "torn", "client-windows", 2.25, 1.0),), options_seed=342
    ),
    "torn_after_kill": Scene(
        "pair",
        10,
        (at(4.47, "kill", "s2", 0.75), at(7.877, "torn", "s2", 2.25, 3.0)),
        options_seed=72,
    ),
    "cut_off_replica": Scene(
        "fan", 20, (at(6, "cut", "first@2<->s1,middle@2", 11),), options_seed=411
    ),
    "both_lines": Scene(
        "single",
        18.6,
        (at(1, "skew", "s1", 13, -8_000), at(4.619, "cut", "main<->s2,s1", 13)),
        options_seed=3156,
    ),
    "short_silence": Scene("tree", 2.6, (at(1.429, "silent", "s1", 0.175),), options_seed=40),
    "failing": Scene(
        failing,
        16,
        (at(5, "cut", "s2<->main", 6),),
        REPLAY,
        tweak=tell_time,
        also=frozenset({"available", "standing"}),
    ),
    "flipped": Scene(
        "pair",
        30,
        (),
        Options(checkpoint_buckets=20),
        tweak=flip_a_row("main@2", 12),
        also=frozenset({"converge", "wrong", "lost", "contract"}),
    ),
    "pairs_idle": Scene(
        "pairs-1",
        22,
        (at(3, "silent", "s1", 8), at(3, "silent", "s2", 8)),
        replace(PAIRS, stall="4s"),
    ),
    "pairs_lent": Scene("pairs-1", 26, (at(2, "wipe", "lower.0", 1),), CHECKPOINTS),
    "pairs_released": Scene(
        "pairs-1",
        40,
        (at(4, "wipe", "lower.0", 6), at(9, "delay", "lower.0@2<->lower.0", 22, 900.0)),
        replace(CHECKPOINTS, rejoin="2s"),
    ),
    "restarts_suspending": Scene(
        suspending,
        26,
        (
            at(8, "cut", "s2<->main,main@2", 16),
            at(11, "kill", "main", 0.5),
            at(13.5, "kill", "main@2", 0.5),
        ),
        Options(checkpoint_buckets=5),
    ),
    "rots": Scene(
        "pair", 18, (at(7, "kill", "main@2", 0.5),), REPLAY, tweak=rot_manifest("main@2", 6.5)
    ),
    "eio_long": Scene("pair", 38, (at(3, "eio-fsync", "main@2", 34),), REPLAY),
    "eio_single": Scene("single", 14, (at(5, "eio-fsync", "main", 1.5),), CHECKPOINTS),
    "undoing_kept": Scene(
        undoing, 16, (at(3, "silent", "s2", 4), at(3.5, "kill", "client-windows", 9)), CHECKPOINTS
    ),
    "interrupted": Scene(
        suspending,
        24,
        (at(3, "cut", "s2<->main,main@2", 8), at(12, "cut", "s2<->main,main@2", 8)),
        Options(group_buckets_max=4),
        tweak=group_steps(200_000),
    ),
    "wipe_and_restart": Scene(
        "chain", 16, (at(6, "wipe", "first", 1), at(6.2, "kill", "second", 0.3)), REPLAY
    ),
    "late_coarse": Scene(
        lambda: union_of_two(1, "500ms", "3s"), 34, (at(2, "skew", "s2", 40, -15_000.0),), REPLAY
    ),
    "damaged_piece": Scene(
        "pairs-1", 16, (at(4, "wipe", "lower.0", 1),), PAIRS, tweak=damage_a_piece("lower.0@2")
    ),
    "full_from_the_start": Scene(
        "single",
        8,
        (),
        REPLAY,
        tweak=full_from_the_start("main"),
        also=frozenset({"delay"}),
    ),
    "full_peer": Scene(
        "chain",
        16,
        tuple(
            fault
            for n in range(4)
            for fault in (at(2 + 3 * n, "full", "s1", 2), at(2.2 + 3 * n, "kill", "first", 0.2))
        ),
        CHECKPOINTS,
    ),
    "pairs_two": Scene("pairs-2", 5, (), PAIRS),
    "replays": Scene(
        few_entries,
        16,
        tuple(at(s, "kill", "main", for_s) for s, for_s in RESTARTS),
        Options(checkpoint_buckets=3, group_buckets_max=1),
    ),
    "flushes_overtake": Scene(
        eventual_chain,
        24,
        tuple(
            at(s, "kill", name, 0.3) for s in (6.6, 9.1, 14.7, 17) for name in ("first", "second")
        ),
        Options(checkpoint_buckets=2, group_buckets_max=1),
        tweak=flushing_for(2.2, 0.1, 0.1),
    ),
    "flushes_torn": Scene(
        eventual_chain,
        34,
        (),
        Options(checkpoint_buckets=3),
        tweak=torn_while_flushing(2, [1, 2, 3, 4, 5] * 4),
    ),
    "flushes_full": Scene(
        eventual_chain,
        24,
        (at(4.7, "kill", "second", 0.3), at(7.3, "kill", "first", 0.3)),
        Options(checkpoint_buckets=3),
        tweak=full_while_flushing((3, 4.5), (6, 7.2)),
    ),
    "pairs_slow_fetch": Scene(
        "pairs-1",
        56,
        (at(8, "delay", "lower.0@2<->lower.0", 36, 900.0), at(9, "wipe", "lower.0", 1)),
        PAIRS,
    ),
}
#: The scenes of pairs that run with every commit.
_SHORT = [SCENES["hosts_lost"], SCENES["hosts_pause"]]
