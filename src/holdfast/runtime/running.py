"""A running network: composes sources, nodes and clients.

`local`: everything runs in this process, with one JVM. `processes`: nodes run in supervised host
processes, one per node or shared; sources and clients run in this process. Both deployments use the
same logs, messages and code.

    with hf.run(net) as run:
        run.source("tap").push([...])
        for table, info in run.client("top"):
            ...
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Literal

from holdfast.clock import monotonic_us
from holdfast.cluster.controller import Controller
from holdfast.cluster.controller_service import ControllerService
from holdfast.cluster.supervisor import HostProcess
from holdfast.config import Options
from holdfast.core.contract_monitor import Action
from holdfast.core.quarantine import reason_of
from holdfast.edge.client import Client
from holdfast.edge.feeds import run_clock, run_feed
from holdfast.edge.source import Source, close_all
from holdfast.errors import (
    InputError,
    LogError,
    NetworkError,
    NodeFailed,
    RowsNotDurable,
    SetupError,
    TransportError,
)
from holdfast.model.fragments import (
    Fragment,
    check_options,
    fragments,
    pairs_of,
    producers_for,
    producers_of,
    replicas_of,
)
from holdfast.model.identity import identity_of
from holdfast.model.layout import Layout, layout_of
from holdfast.model.network import Network
from holdfast.model.partitions import physical
from holdfast.runtime.client_opening import announce_clients, open_client
from holdfast.runtime.component_health import Parts
from holdfast.runtime.contracts import Monitor
from holdfast.runtime.failures import Failures, member
from holdfast.runtime.folders import describe, source_folder
from holdfast.runtime.local import start_nodes
from holdfast.runtime.metrics import Metrics
from holdfast.runtime.rolling_restart import Rolling
from holdfast.runtime.run_status import status_of
from holdfast.storage import Log
from holdfast.storage.root import CONTROLLER, StorageRoot
from holdfast.streams.calls import (
    GetProducers,
    GetStatus,
    Locate,
    Location,
    Producers,
    Retire,
    Retired,
    RunStatus,
)
from holdfast.streams.delivery import Peer
from holdfast.streams.serving import Service
from holdfast.streams.subscribing import Connections
from holdfast.transport.flight import FlightPeer, FlightServer
from holdfast.transport.in_process import InProcess

_log = logging.getLogger("holdfast.running")
NOT_STARTED = "not started: use `with hf.run(net) as run:`, or call run.start() and run.stop()"
STOPPED = "stopped; start another one with hf.run(...) on the same storage"
State = Literal["new", "starting", "running", "stopped"]
Deployment = Literal["local", "processes"]
#: Time limit for the start of a host.
READY_S = 180.0


class Run:
    """A running network, created by `hf.run`; a context manager that stops it on exit."""

    def __init__(
        self,
        network: Network,
        *,
        storage: str | None = None,
        deployment: Deployment = "local",
        options: Options | None = None,
        app: str | None = None,
        accept_versions: bool = False,
    ) -> None:
        if deployment not in ("local", "processes"):
            raise InputError(f"deployment={deployment!r} is not one of 'local', 'processes'")
        if deployment == "processes" and app is None:
            raise InputError(
                "deployment='processes' needs app='path.py' or 'module:network', because each host "
                "process imports the network by itself"
            )
        if deployment == "local" and options is not None and options.hosts is not None:
            raise InputError(
                "hosts: expected deployment='processes', found 'local', which runs in one process; "
                "set deployment='processes' (--deployment processes), or remove hosts"
            )
        network.check()
        network = physical(network)
        check_options(network, options or Options())
        #: Identity of the network; computed before any function of the application is called.
        self.identity = identity_of(network)
        self._accept_versions = accept_versions
        self.network, self.options = network, options or Options()
        self.deployment, self.app = deployment, app
        self._state: State = "new"
        #: All resources are released.
        self._released = False
        #: The storage is deleted when the run stops.
        self.temporary = storage is None
        self.storage = os.path.abspath(storage or tempfile.mkdtemp(prefix="holdfast-"))
        self.service = Service(heartbeat_s=self.options.heartbeat_s)
        #: The address at which `consumer` reaches `producer`, which listens at `address`; fault
        #: injection puts proxies here.
        self.route: Callable[[str, str, str], str] = lambda consumer, producer, address: address
        self.sources: dict[str, Source] = {}
        self.fragments = fragments(network)
        #: Hosts and their initial nodes.
        self.layout: Layout = {}
        if deployment == "processes":
            self.layout = layout_of(network, self.options.hosts, self.options.standby)
        self.nodes: dict[str, Any] = {}
        self.processes: dict[str, HostProcess] = {}
        #: Called by the monitor when a promise is broken, and when it is kept again.
        self.on_contract: list[Callable[[Action], None]] = []
        #: Nodes that were reported as permanently failed.
        self._noted: set[str] = set()
        self.controller: Controller
        self.rolling: Rolling
        self._root: StorageRoot | None = None
        #: The query was refused before anything was computed.
        self._refused = False
        self._described = False
        self._logs: list[Log] = []
        self.clients: list[Client] = []
        self.failures = Failures(
            network, local=deployment == "local", epoch=self._epoch, clients=self.clients,
            sources=self.sources, logs=self.service.logs,
        )  # fmt: skip
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._producers = producers_of(network)
        self.monitor = Monitor(
            network, self.fragments, self.sources, self.nodes, self.clients, self.on_contract
        )
        self.parts = Parts(
            network, self.processes, lambda host: self.controller.assigned(host),
            lambda host: self._controller_service.unhealthy(host),
            lambda: self._controller_service.differs(),
            lambda: self._controller_service.recovery_ms(),
            self.failures if deployment == "local" else None,
        )  # fmt: skip
        self.metrics = Metrics(self.monitor, self.sources, self.nodes, self.processes, self.parts)

    def __repr__(self) -> str:
        state = {"new": NOT_STARTED, "stopped": STOPPED}.get(self._state, self._state)
        where = f", storage {self.storage}" if self._state in ("starting", "running") else ""
        if self._state == "running" and (stopped := self.parts.stopped()):
            count = f"{len(stopped)} of {len(self.network.outputs)} outputs"
            state = f"{count} stopped ({', '.join(stopped)}; see status())"
        return f"<Run of network {self.network.name!r} ({self.deployment}), {state}{where}>"

    @property
    def state(self) -> State:
        return self._state

    def start(self) -> Run:
        if self._state != "new":
            raise InputError(
                f"a run can be started only once; this run is {self._state}: call hf.run(...) again"
            )
        self._state = "starting"
        try:
            self._start()
        except BaseException as err:
            self._refused |= isinstance(err, NetworkError | InputError)
            with suppress(RowsNotDurable):  # already logged
                self.stop()
            raise
        self._state = "running"
        return self

    def _start(self) -> None:
        self._root = StorageRoot.take(
            self.storage, self.identity, fsync=self.options.fsync == "always",
            accept_versions=self._accept_versions,
        )  # fmt: skip
        if self.options.metrics_port is not None:
            self.metrics.serve(self.options.host, self.options.metrics_port)
        pairs = pairs_of(self.network)
        self.controller = Controller(
            self.open_log(os.path.join(self.storage, CONTROLLER), CONTROLLER, epoch=False),
            pairs,
            monotonic_us(),
            self.layout,
            self.identity,
            silence_us=int(1e6 * self.options.silence_s),
            rejoin_us=self.options.rejoin_us,
            stall_us=self.options.stall_us,
        )
        for fragment in self.fragments:
            for stream in fragment.inputs:
                self.service.consumers.setdefault(stream, set()).update(self._replicas(fragment))
        announce_clients(self)
        for op in self.network.sources:
            log = self.open_log(source_folder(self.storage, op.name), op.name)
            source = self.sources[op.name] = Source(
                op, log, self.network.width_us, buffer_buckets=self.options.buffer_buckets,
                received=partial(self.service.received, op.name),
            )  # fmt: skip
            self.service.logs[op.name] = log
            self.service.pushes[op.name] = source.take
        self.service.handle(GetStatus, lambda _: RunStatus(self.status()))
        self.service.handle(Retire, lambda ask: Retired(self.retire(ask.source, ask.why)))
        outputs = [op.name for op in self.network.outputs]
        self._controller_service = ControllerService(self.controller, self.service, outputs)
        self._controller_service.on_progress = lambda host, at: self.processes[host].progressed(at)
        self._controller_service.on_heartbeat = lambda host: self.processes[host].heard()
        self.service.handle(Locate, self._locate)
        self.service.handle(GetProducers, self._producers_of)
        self.rolling = Rolling(self)
        # Before the slow part of the start, so that `status` can report it.
        self.server = FlightServer(self.service, self.options.host, self.options.port)
        describe(self)
        self._described = True
        if self.deployment == "local":
            start_nodes(self)
        else:
            self._start_processes()
        for name, source in self.sources.items():
            if source.op.clock in ("wall", "data"):
                self._thread(partial(run_clock, source, self._stop), f"clock-{name}", name)
            if source.op.feed is not None:
                self._thread(partial(run_feed, source, self._stop), f"feed-{name}", name)
        self._thread(partial(self.monitor.run, self._stop), "monitor")
        if pairs and self.deployment == "processes":
            judge = partial(self._controller_service.judge, self._stop, self.options.heartbeat_s)
            self._thread(judge, "controller")

    def _start_processes(self) -> None:
        assert self.app is not None
        for host in self.layout:
            process = HostProcess(
                self.app, host, self.storage, self.route(host, CONTROLLER, self.server.address),
                self.options, self._controller_service.ended,
            )  # fmt: skip
            self.processes[host] = process
            process.start()
        for host in self.layout:
            log_note = f"its log is in {os.path.join(self.storage, 'nodes')}"
            ready = partial(self._ready, host)
            self.wait_for(ready, READY_S, f"host {host} to start ({log_note})")
        self._thread(partial(self.parts.watch, self._stop, self._note_parts), "parts")

    def _ready(self, host: str) -> bool:
        """Whether the host is up, or waiting is useless and the outputs continue without it."""
        if len(self.parts.stopped()) == len(self.network.outputs):
            self._refused = True
            component, status = next(iter(self.parts.gone().values()))
            raise SetupError(
                f"no output can be computed: {component}: {status.reason.rstrip('.')}. Fix the "
                f"cause and start the run again; the logs are in {self.storage}/nodes"
            )
        return self._controller_service.is_up(host) or self.parts.settled(host)

    # -- for the application ----------------------------------------------------------------------

    def source(self, name: str) -> Source:
        self._check_running()
        if name not in self.sources:
            raise InputError(f"there is no source {name!r} (sources: {', '.join(self.sources)})")
        return self.sources[name]

    def retire(self, source: str, why: str = "the source will not return") -> int:
        """Continue permanently without a source, from the returned bucket on."""
        bucket = self.source(source).retire(why)
        self.failures.recovered(member(source))  # no output needs the source any more
        return bucket

    def client(
        self,
        output: str,
        *,
        tentative: bool = False,
        durable: bool | None = None,
        name: str | None = None,
    ) -> Client:
        """Open a client of an output. A client delivers stable buckets; with `tentative` also the
        tentative buckets that are computed while inputs are missing, until the stable result
        replaces them (`info.replaces`). `durable` stores the position (and with `archive` the
        received rows); the default is true for a named storage. Several clients of one output need
        a `name` each; a durable client continues under its name after a restart. Beside it, clients
        that are not durable only watch: no results are retained for them. The audit judges
        the client without a name."""
        self._check_running()
        return open_client(self, output, tentative=tentative, durable=durable, name=name)

    def producers(self, stream: str, consumer: str) -> Connections:
        """Connections of `consumer` to each replica that produces a stream."""
        if self.deployment == "local":
            return {stream: partial(self.peer_of, stream, consumer, stream)}
        producers = producers_for(self.network, stream, consumer)
        return {name: partial(self.peer_of, stream, consumer, name) for name in producers}

    def peer_of(self, stream: str, consumer: str, producer: str) -> Peer:
        if self.deployment == "local" or producer in self.sources:
            return InProcess(self.service)
        address = self.controller.address(producer)
        if address is None:
            raise TransportError(f"node {producer!r} has not reported yet")
        return FlightPeer(
            self.route(consumer, producer, address),
            silence_s=self.options.silence_s, by_reference=self.options.by_reference,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        self._check_started()
        return status_of(self)

    def raise_failure(self) -> None:
        """Raise the failure that stopped an output, if any."""
        for op in self.network.outputs:
            if (error := self.failures.stopped(op.name)) is not None:
                raise error

    def wait_for(self, test: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait until `test` is true. Raises the failure that stopped an output, or `SetupError`
        after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while not test():
            self.raise_failure()
            if time.monotonic() > deadline_s:
                raise SetupError(f"timed out after {limit_s:.0f} s waiting for {what}")
            time.sleep(0.02)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until every output has ended, because all sources ended; only for local runs.
        `timeout_s` applies to each node; false if it expires."""
        for node in self.nodes.values():
            if not node.ended.wait(timeout_s):
                return False
        self.raise_failure()
        return True

    def stop(self) -> None:
        """Stop everything cleanly and make pushed rows durable. If the storage refuses them,
        `RowsNotDurable` names the sources and the numbers of rows."""
        if self._released:
            return
        self._state = "stopped"
        self._stop.set()
        self.metrics.close()
        for client in self.clients:
            client.close()
        for thread in self._threads:
            thread.join(timeout=10)
        errors = close_all(self.sources.values())
        not_durable = [] if self.temporary else errors  # a temporary storage is deleted anyway
        for error in not_durable:
            _log.warning("%s", error)
        for node in self.nodes.values():
            node.stop()
        for host, process in self.processes.items():  # all in parallel
            process.ask_to_stop(at_once=not self._controller_service.is_up(host))
        for process in self.processes.values():
            process.stop()
        if hasattr(self, "server"):
            self.server.stop()
        for log in self._logs:
            log.close()
        if self._described:  # otherwise the file belongs to another run
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.storage, "run.json"))
        if self._root is not None:
            if self._refused and not any(s.log.streams() for s in self.sources.values()):
                with suppress(LogError):
                    self._root.forget()
            self._root.release()
        if self.temporary:
            shutil.rmtree(self.storage, ignore_errors=True)
        self._released = True
        if not_durable:
            raise RowsNotDurable("; ".join(not_durable))

    def kill(self) -> None:
        """SIGKILL the processes of all hosts. A signal handler may call this method."""
        for process in list(self.processes.values()):
            process.end_at_once()

    def __enter__(self) -> Run:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except RowsNotDurable:  # already logged
            if kind is None:
                raise

    # -- inside -----------------------------------------------------------------------------------

    def _check_started(self) -> None:
        if self._state == "new":
            raise InputError(f"the run is {NOT_STARTED}")

    def _check_running(self) -> None:
        self._check_started()
        if self._state == "stopped":
            raise InputError(f"the run was {STOPPED}")

    def open_log(
        self, folder: str, owner: str, *, archive: bool | None = None, epoch: bool = True
    ) -> Log:
        archived = self.options.archive if archive is None else archive
        log = Log.open(
            folder, owner, fsync=self.options.fsync, archive=archived, query=self.identity.digest
        )
        self._logs.append(log)
        if epoch:
            log.raise_epoch(self.controller.next_epoch(owner, log.epoch))
        return log

    def _replicas(self, fragment: Fragment) -> tuple[str, ...]:
        """The nodes of a fragment. A local run has one node per fragment: a second replica in the
        same process would not protect against any failure."""
        if self.deployment == "local":
            return (fragment.name,)
        return replicas_of(self.network, fragment.name)

    def _epoch(self, node: str) -> int:
        return self.controller.epoch(node) if self.deployment == "processes" else 0

    def _note_parts(self) -> None:
        """Report nodes that are not restarted automatically, so that outputs without another
        replica stop."""
        lost_nodes = self.parts.gone(final=True)
        for node in lost_nodes.keys() - self._noted:
            status = lost_nodes[node][1]
            self.failures.report(node, status.reason, advice=status.remedy)
        for node in self._noted - lost_nodes.keys():
            self.failures.recovered(node)
        self._noted = set(lost_nodes)

    def _thread(self, run: Callable[[], None], name: str, source: str | None = None) -> None:
        def guarded() -> None:
            try:
                run()
            except NodeFailed:
                pass  # no consumer of its rows is left
            except Exception as err:
                if not self._stop.is_set():
                    component = f"thread {name}" if source is None else member(source)
                    _log.error("%s stopped: %s", component, reason_of(err))
                    self.failures.report(component, err)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _producers_of(self, ask: GetProducers) -> Producers:
        has_nodes = ask.stream in self._producers
        outputs = tuple(op.name for op in self.network.outputs)
        names = tuple(self.producers(ask.stream, "")) if has_nodes else ()
        return Producers(names, has_nodes or ask.stream in self.service.logs, outputs)

    def _locate(self, ask: Locate) -> Location:
        """The address of a source, or of one replica of a producer, for a consumer."""
        address: str | None = self.server.address
        if self.deployment == "processes" and ask.producer not in self.sources:
            address = self.controller.address(ask.producer, catching_up=ask.catching_up)
        if address is not None and ask.consumer is not None:
            address = self.route(ask.consumer, ask.producer, address)
        return Location(address)
