"""`holdfast run`: prints results as they arrive. `holdfast restart`: a rolling restart."""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from rich.console import Console

from holdfast.cli.find import ask, described, running, storage_of
from holdfast.cli.interrupts import Interrupts, kill_all
from holdfast.cli.show import broken_text, show_report
from holdfast.config import Options
from holdfast.core.contract_monitor import Action, Broken
from holdfast.edge.client import BucketInfo
from holdfast.errors import IdentityMismatch, InputError, NodeFailed, SetupError, TransportError
from holdfast.model.identity import differences, identity_of, listed
from holdfast.model.loading import load
from holdfast.model.network import Network
from holdfast.model.partitions import physical
from holdfast.runtime.failures import Failure
from holdfast.runtime.rolling_restart import BACK_S
from holdfast.runtime.running import Run
from holdfast.storage.root import delete_storage, read_marker
from holdfast.streams.calls import GetHosts, GetRestarted, Restart
from holdfast.transport.flight import FlightPeer
from holdfast.types import Stability

SHOWN_ROWS = 3
DAY_US = 86_400_000_000
#: Interval of the messages while a run starts.
STARTING_S = 10.0


class Printer:
    """Prints one block per bucket: summary, delay and first rows. Any thread may print; lines are
    never mixed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._failed: list[Failure] = []
        self.buckets = 0
        self.rows = 0
        self.delays_ms: list[float] = []

    def __call__(self, table: pa.Table, info: BucketInfo) -> None:
        with self._lock:
            at = datetime.fromtimestamp(info.received_at_us / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3]
            self._console.print(
                f"[dim]{at}[/dim] [bold]{info.output}[/bold] {description(info)}", highlight=False
            )
            if info.stability is Stability.STABLE and not info.rec_done:
                self.buckets += 1
                self.rows += info.rows
                if info.delay_us < DAY_US:
                    self.delays_ms.append(info.delay_us / 1_000)
            for row in table.slice(0, SHOWN_ROWS).to_pylist():
                text = "  ".join(f"{key}={_text(value)}" for key, value in row.items())
                self._console.print(
                    f"    {text}", highlight=False, overflow="ellipsis", no_wrap=True, markup=False
                )
            if table.num_rows > SHOWN_ROWS:
                self._console.print(
                    f"    ... {table.num_rows - SHOWN_ROWS} more rows", style="dim", highlight=False
                )

    def failures(self, failures: Iterable[Failure]) -> None:
        """Print each failure once, while the rest of the run continues."""
        for failure in failures:
            if failure not in self._failed:
                self._failed.append(failure)
                with self._lock:
                    self._console.print(
                        failure.text(), style="bold red", highlight=False, soft_wrap=True,
                        markup=False,
                    )  # fmt: skip

    def contract(self, action: Action, text: str) -> None:
        """Print, among the results, that a promise was broken or is kept again."""
        color = "bold red" if isinstance(action, Broken) else "green"
        with self._lock:
            at = datetime.fromtimestamp(action.at / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3]
            self._console.print(
                f"[dim]{at}[/dim] [{color}]{text}[/{color}]", highlight=False, soft_wrap=True
            )


def description(info: BucketInfo) -> str:
    """A summary of a bucket in one line."""
    if info.rec_done:
        return f"[green]REC_DONE[/green] corrected up to bucket {info.bucket}"
    color = "green" if info.stability is Stability.STABLE else "yellow"
    note = ", replaces the tentative rows" if info.replaces else ""
    if info.stability is Stability.TENTATIVE:
        shares = f"{info.inputs_share:.0%} of the inputs, about {info.rows_share:.0%} of the rows"
        note = f", without {', '.join(info.missing) or 'earlier rows'} ({shares})"
    rows = "1 row" if info.rows == 1 else f"{info.rows} rows"
    # In a replay of old rows, the delay means nothing.
    delay = f", {info.delay_us / 1_000:.0f} ms after its end" if info.delay_us < DAY_US else ""
    return f"bucket {info.bucket} [{color}]{info.stability.value}[/{color}] {rows}{delay}{note}"


def _text(value: Any) -> str:
    return value.strftime("%H:%M:%S.%f") if isinstance(value, datetime) else str(value)


@contextmanager
def _reminding(notes: Console) -> Iterator[None]:
    """Say regularly that the run is still starting: hosts and their JVMs take a while."""
    started, began = threading.Event(), time.monotonic()

    def remind() -> None:
        while not started.wait(STARTING_S):
            notes.print(f"still starting ({time.monotonic() - began:.0f} s) ...", highlight=False)

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        started.set()


def run_live(args: argparse.Namespace, options: Options) -> int:
    """Run an application. All checks that need no Spark come first, because Spark starts slowly."""
    console, notes = Console(soft_wrap=False), Console(stderr=True, soft_wrap=True)
    started: list[Run] = []
    with Interrupts(lambda: kill_all(started)):
        network = loaded(args.app, options)
        storage = storage_of(args.storage, network, None)
        if args.fresh and (deleted := delete_storage(storage)):
            console.print(f"deleted from {storage}: {', '.join(deleted)}", highlight=False)
        run = Run(
            network, storage=storage, deployment=args.deployment, options=options, app=args.app,
            accept_versions=args.accept_versions,
        )  # fmt: skip
        started.append(run)
        printer = Printer(console)
        if not args.quiet:
            # The printer shows contract events among the results; do not log them twice.
            logging.getLogger("holdfast.monitor").setLevel(logging.ERROR)
            run.on_contract.append(
                lambda action: printer.contract(action, run.monitor.text(action))
            )
        hosts = f"hosts {', '.join(run.layout)} (Spark)" if run.layout else "Spark"
        notes.print(f"starting {hosts} ...", highlight=False)
        with _reminding(notes):
            run.start()
        try:
            _show(run, args, console, printer)
        except KeyboardInterrupt:
            pass  # the signal handler has already printed a message
        finally:
            stopped = run.parts.stopped()
            run.stop()
    printer.failures(run.failures.all())
    run.raise_failure()
    if printer.buckets:
        summary = f"{printer.buckets} buckets, {printer.rows} rows"
        if delays := sorted(printer.delays_ms):
            median = f"median delay {delays[len(delays) // 2]:.0f} ms"
            summary += f", {median}, longest {delays[-1]:.0f} ms"
        console.print(summary)
    for name, contract in run.monitor.contracts().items():
        if contract["breaks"]:
            console.print(f"[red]{broken_text(name, contract)}[/red]", highlight=False)
    if not args.audit:
        return 1 if stopped else 0
    from holdfast.engine import session
    from holdfast.verify.audit import audit

    console.print("audit: computing the ideal output from the source logs …")
    report = audit(network, storage, session.start(options).large)
    show_report(report, None)
    return 0 if report.ok and not stopped else 1


def _show(run: Run, args: argparse.Namespace, console: Console, printer: Printer) -> None:
    """Print results and failures until all outputs have ended or the time is over."""
    console.print(
        f"running [bold]{run.network.name}[/bold] ({args.deployment}), storage {run.storage}, "
        f"Flight on {run.server.address}"
        + (f", metrics on {run.metrics.url}" if run.metrics.url else "")
    )
    outputs = run.network.outputs
    threads = [_consumer(run, op, None if args.quiet else printer) for op in outputs]
    deadline_s = None if args.seconds is None else time.monotonic() + args.seconds
    while any(thread.is_alive() for thread in threads):
        printer.failures(run.failures.all())
        if deadline_s is not None and time.monotonic() >= deadline_s:
            break
        time.sleep(0.1)


def loaded(app: str, options: Options) -> Network:
    """Load the network of an application. Spark is started only if the application builds
    Columns."""
    try:
        return load(app)
    except SetupError as err:
        if not isinstance(err.__cause__, PySparkException | AssertionError):
            raise
    from holdfast.engine import session

    session.start(options)
    return load(app)


def _consumer(run: Run, op: Any, printer: Printer | None) -> threading.Thread:
    protected = run.network.protections.values()
    client = run.client(
        op.name, durable=True, tentative=any(one.on_failure != "block" for one in protected)
    )
    wants_all = getattr(op.sink, "tentative", False)

    def deliver(table: pa.Table, info: BucketInfo) -> None:
        final = info.stability is Stability.STABLE and not info.rec_done
        if op.sink is not None and (final or wants_all):
            op.sink(table, info)
        if printer is not None:
            printer(table, info)

    def read() -> None:
        try:
            client.foreach_bucket(deliver)
        except Exception as err:
            if not isinstance(err, NodeFailed):  # already reported
                run.failures.report(f"client {op.name}", err)

    thread = threading.Thread(target=read, name=f"client-{op.name}", daemon=True)
    thread.start()
    return thread


def restart(storage: str, host: str | None) -> int:
    """Restart the hosts one after the other, each when the previous host is back."""
    chief, console = running(storage), Console()
    hosts = ask(storage, GetHosts()).names
    if not hosts:
        raise InputError(
            "restart needs deployment 'processes', but this network runs in one process: stop the "
            "run and start it again"
        )
    check_unchanged(storage)
    for number, name in enumerate([host] if host else hosts, 1):
        began = time.monotonic()
        count = 1 if host else len(hosts)
        console.print(f"restarting host {name} ({number} of {count}) ...", highlight=False)
        ask(storage, Restart(name))
        while not _restarted(chief, name):
            if time.monotonic() - began > BACK_S:
                raise SetupError(
                    f"host {name!r} did not return within {BACK_S:.0f} s; see `holdfast status`"
                )
            time.sleep(0.5)
        console.print(
            f"host {name} is back after {time.monotonic() - began:.1f} s", highlight=False
        )
    return 0


def check_unchanged(storage: str) -> None:
    """Refuse the restart before any host is stopped, if the query, the code or the libraries have
    changed: the controller would refuse the restarted hosts."""
    identity, description = read_marker(storage), described(storage, "app", "cwd")
    with chdir(description["cwd"]):
        network = loaded(description["app"], Options())
    if identity is not None and (changes := differences(identity, identity_of(physical(network)))):
        raise IdentityMismatch(
            f"{description['app']} or the libraries differ from those at the start of this run:"
            f"{listed(changes)}\n"
            "No host was restarted. Undo the change. To keep the change, stop the run and start it "
            "again (a changed query with another --storage, changed libraries with "
            "--accept-versions)"
        )


def _restarted(chief: FlightPeer, host: str) -> bool:
    with suppress(TransportError):  # busy; the caller asks again
        return chief.call(GetRestarted(host)).restarted
    return False
