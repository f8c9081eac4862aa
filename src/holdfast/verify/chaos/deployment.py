"""A network deployed on real processes, with a fault-injecting proxy in every link.

Sources are fed in real time, and clients record every bucket they receive. Several scenarios can
run one after another on the same deployment; stream time continues between them.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from holdfast.clock import now_us
from holdfast.config import Options
from holdfast.core.contract_monitor import Action, Broken
from holdfast.edge.client import Client
from holdfast.errors import InputError, SetupError
from holdfast.runtime.running import Run
from holdfast.types import bucket_of
from holdfast.verify.chaos.aftermath import Aftermath
from holdfast.verify.chaos.deployed_networks import NETWORKS
from holdfast.verify.chaos.process_faults import CLIENT
from holdfast.verify.chaos.proxy import Link, Proxies
from holdfast.verify.chaos.pusher import Pusher
from holdfast.verify.chaos.recorder import Recorder, record
from holdfast.verify.chaos.watcher import Watcher
from holdfast.verify.history import Reported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Rows cross the links (`by_reference` is off), and checkpoints are frequent. Short-lived JVMs run
#: better without the second-tier compiler.
OPTIONS = Options(
    memory="768m",
    java_options="-XX:TieredStopAtLevel=1",
    by_reference=False,
    checkpoint_buckets=25,
)
#: Deadline for the first results of all clients.
RESULTS_S = 120.0
#: The deployment is warm when results have arrived within `WARM_US` of their bucket for
#: `WARM_FOR_S` seconds.
WARM_US = 2_000_000
WARM_FOR_S = 3.0
#: Warm-up stops after this time even if the deployment is not warm, as on a loaded machine.
WARM_S = 40.0
#: Deadline for stopped processes and client threads to exit.
GONE_S = 15.0


class Deployment:
    """One running network with its proxies, clients, pusher and watcher.

    `spark` computes the ideal results. The nodes use their own JVMs.
    """

    def __init__(self, network: str, spark: SparkSession, *, options: Options = OPTIONS) -> None:
        if network not in NETWORKS:
            raise InputError(f"network {network!r} is not one of {', '.join(NETWORKS)}")
        self.network = NETWORKS[network]
        self.recorder = Recorder()
        self.storage = tempfile.mkdtemp(prefix="holdfast-chaos-")
        #: True retains the storage folder, to analyze a failed scenario.
        self.keep_storage = False
        self.aftermath = Aftermath(self.network, self.storage, spark)
        self.proxies = Proxies()
        self.run = Run(
            self.network,
            storage=self.storage,
            deployment="processes",
            options=options,
            app=f"holdfast.verify.chaos.deployed_networks:{network}",
        )
        self.run.route = self._route
        self.run.on_contract.append(self._reported)
        self.clients: list[Client] = []
        self._consumers: list[threading.Thread] = []
        self._reading = threading.Event()
        self._reading.set()
        self._stopped = False

    def start(self) -> Deployment:
        try:
            self.run.start()
            for op in self.network.outputs:
                client = self.run.client(op.name, tentative=bool(self.network.protections))
                self.clients.append(client)
                self._consumers.append(
                    threading.Thread(
                        target=record,
                        args=(client, self.recorder, self._reading),
                        name=client.name,
                        daemon=True,
                    )
                )
                self._consumers[-1].start()
            self.watcher = Watcher(self.run, self.clients, self.recorder)
            self.pusher = Pusher(self.run.sources, self.network.width_us, self.recorder)
            self._warm_up()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop everything that was started. Safe in any state, also after a failed `start`."""
        if self._stopped:
            return
        self._stopped = True
        self._reading.set()
        if hasattr(self, "pusher"):
            self.pusher.close()
        for link in self.proxies.all():
            link.heal()
        if hasattr(self, "watcher"):
            self.watcher.close()
        self.run.stop()
        self.proxies.close()
        for consumer in self._consumers:
            consumer.join(timeout=GONE_S)
        if not self.keep_storage:
            shutil.rmtree(self.storage, ignore_errors=True)

    def left(self) -> list[str]:
        """Return the processes that still run `GONE_S` seconds after `stop`."""
        deadline = time.monotonic() + GONE_S
        while (processes := self.watcher.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [f"{process.pid} {' '.join(process.cmdline()[:3])}" for process in processes]

    def __enter__(self) -> Deployment:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- used by scenarios --------------------------------------------------------------------

    def begin(self, seed: int) -> int:
        """Push rows from the next bucket on. Returns that bucket when it begins."""
        width_us = self.network.width_us
        first = bucket_of(now_us(), width_us) + 1
        time.sleep((first * width_us - now_us()) / 1e6)
        self.recorder.take()
        self.pusher.begin(first, seed)
        return first

    def settle(self, upto: int, limit_s: float) -> bool:
        """Wait until every client has bucket `upto` and all replaced processes have exited."""

        def settled() -> bool:
            return all(
                client.position is not None and client.position >= upto for client in self.clients
            ) and not any(process.zombies for process in self.run.processes.values())

        return self.wait(settled, limit_s)

    def wait(self, test: Callable[[], bool], limit_s: float) -> bool:
        """Poll `test` until it holds or `limit_s` has passed. Returns whether it held."""
        deadline = time.monotonic() + limit_s
        while not test():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def links(self, sender: str, receiver: str) -> list[tuple[Link, str]]:
        """Return the links between two processes, each with its own name for the sender."""
        links = []
        for link in self.proxies.all():
            ends = {CLIENT if e.startswith(f"{CLIENT}-") else e: e
                    for e in (link.producer, link.consumer)}  # fmt: skip
            if set(ends) == {sender, receiver}:
                links.append((link, ends[sender]))
        return links

    def pause_clients(self) -> None:
        self._reading.clear()

    def resume_clients(self) -> None:
        self._reading.set()

    # -- internals ----------------------------------------------------------------------------

    def _route(self, consumer: str, producer: str, address: str) -> str:
        return self.proxies.link(producer, consumer, address).address

    def _reported(self, action: Action) -> None:
        is_kept = not isinstance(action, Broken)
        report = Reported(action.at, action.output, action.bucket, action.promise, is_kept)
        self.recorder.add(report)

    def _warm_up(self) -> None:
        """Wait until results arrive promptly. The first results of a new JVM are slow."""
        self.begin(seed=0)
        cold_at = time.monotonic()

        def warm() -> bool:
            nonlocal cold_at
            due = bucket_of(now_us() - WARM_US, self.network.width_us) - 1
            if any(client.position is None or client.position < due for client in self.clients):
                cold_at = time.monotonic()
            return time.monotonic() - cold_at > WARM_FOR_S

        def results() -> bool:
            self.run.raise_failure()
            return all(client.position is not None for client in self.clients)

        if not self.wait(results, RESULTS_S):
            self.keep_storage = True
            raise SetupError(
                f"network {self.network.name!r} produced no results within {RESULTS_S:.0f} s; "
                f"the logs of its nodes are in {self.storage}/nodes"
            )
        self.wait(warm, WARM_S)
        self.settle(self.pusher.rest(), WARM_S)
