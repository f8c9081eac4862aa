"""`holdfast`: run, check, status, tail, dead-letters, restart, retire, audit, experiment, simulate,
chaos, verify, reliability, version.

Exit codes: 0 success; 1 negative verdict (audit failed, node stopped); 2 error in the command line,
the application or the machine, with one message that states what to do; 130 interrupted. `--debug`
adds stack traces. Commands import slow modules when they run, so that a command can be interrupted
without a stack trace."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from typing import Any

from holdfast import __version__
from holdfast.cli.interrupts import INTERRUPTED
from holdfast.config import Options
from holdfast.errors import HoldfastError, NodeFailed
from holdfast.spark_settings import parse_settings


def main(argv: list[str] | None = None) -> int:
    debug = False
    try:
        args = _parser().parse_args(argv)
        if debug := args.debug:
            os.environ["HOLDFAST_DEBUG"] = "1"
        logging.basicConfig(
            level=logging.INFO if debug else logging.WARNING,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        return int(args.call(args))
    except HoldfastError as err:
        if debug:
            raise
        print(f"error: {err}", file=sys.stderr)
        return 1 if isinstance(err, NodeFailed) else 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The process at the other end of a pipe (`| head`) has exited.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="holdfast",
        description="Fault-tolerant continuous queries on Spark.",
        epilog="APP names an hf.Network: path/to/app.py (a file with one network) or "
        "package.module:network.",
    )
    top.add_argument("--debug", action="store_true", help="show stack traces and Spark's own log")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    run = _command(commands, "run", "run an application until it ends or is interrupted", _run)
    _app(run)
    _storage(run)
    run.add_argument(
        "--deployment",
        choices=("local", "processes"),
        default="local",
        help="run everything in one process (default), or in host processes",
    )
    run.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="with --deployment processes: N hosts share the nodes (default: one host per node)",
    )
    run.add_argument(
        "--standby",
        type=int,
        default=0,
        metavar="N",
        help="with --hosts: N standbys take over the nodes of lost hosts (default: %(default)s)",
    )
    run.add_argument("--seconds", type=_positive, help="stop after this many seconds")
    run.add_argument(
        "--fresh",
        action="store_true",
        help="delete the storage first; refused if it is in use or not Holdfast's own",
    )
    run.add_argument(
        "--accept-versions",
        action="store_true",
        help="continue a storage written with other versions of Python, Spark or libraries",
    )
    run.add_argument(
        "--audit", action="store_true", help="audit after the run; exit code 1 if it fails"
    )
    run.add_argument("--quiet", action="store_true", help="do not print results")
    run.add_argument(
        "--port", type=int, default=0, help="port of the Flight server (default: any free port)"
    )
    run.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve Prometheus metrics on this port, 0 for any free port (default: no metrics)",
    )
    run.add_argument("--memory", default="2g", help="heap of each JVM (default: %(default)s)")
    run.add_argument(
        "--fsync",
        choices=("always", "never"),
        default="always",
        help="flush to disk before acknowledging (default: %(default)s)",
    )
    run.add_argument(
        "--recovery",
        metavar="{replay,checkpoint}",
        default="replay",
        help="replay: upstream retains the rows from which a node that lost its storage is "
        "rebuilt; checkpoint: upstream retains only the rows after the newest checkpoint, and lost "
        "storage is rebuilt only if no row was deleted; for 'cec' use net.protect (default: "
        "%(default)s)",
    )
    run.add_argument(
        "--checkpoint-buckets",
        type=int,
        default=100,
        metavar="N",
        help="checkpoint at least every N buckets; 0: only where recovery='cec' or a replica of a "
        "pair without its peer needs one (default: %(default)s)",
    )
    run.add_argument(
        "--buffer-buckets",
        type=int,
        metavar="N",
        help="stop accepting rows when a consumer is N buckets behind (default: never)",
    )
    run.add_argument(
        "--no-archive",
        action="store_true",
        help="do not retain source logs and the rows that clients received; the run cannot be "
        "audited",
    )
    _master(run)

    check = _command(commands, "check", "check an application without running it", _check)
    _app(check)
    _master(check)

    status = _command(commands, "status", "show the status of a running network", _status)
    status.add_argument(
        "app", nargs="?", metavar="APP", help="find the storage of this application"
    )
    _storage(status)
    status.add_argument("--json", action="store_true", help="print the complete status as JSON")

    tail = _command(commands, "tail", "follow an output of a running network", _tail)
    tail.add_argument("output", metavar="OUTPUT")
    tail.add_argument("app", nargs="?", metavar="APP", help="find the storage of this application")
    _storage(tail)
    tail.add_argument("--json", action="store_true", help="one JSON object per row")
    tail.add_argument("-n", "--buckets", type=int, help="stop after N buckets with rows")
    tail.add_argument(
        "--all", action="store_true", help="start at the oldest bucket, not at the next one"
    )

    dead = _command(
        commands, "dead-letters", "list the rows that a source rejected, and why", _dead
    )
    dead.add_argument("source", metavar="SOURCE")
    dead.add_argument("app", nargs="?", metavar="APP", help="find the storage of this application")
    _storage(dead)
    dead.add_argument("--json", action="store_true", help="one JSON object per row")
    dead.add_argument(
        "-n", "--rows", type=int, default=20, metavar="N",
        help="show the newest N rows (default: %(default)s); 0 for all",
    )  # fmt: skip

    restart = _command(
        commands, "restart", "restart all hosts one after the other, while the others continue",
        _restart,
    )  # fmt: skip
    restart.add_argument(
        "app", nargs="?", metavar="APP", help="find the storage of this application"
    )
    _storage(restart)
    restart.add_argument("--host", metavar="HOST", help="restart only this host")

    retire = _command(commands, "retire", "continue permanently without a source", _retire)
    retire.add_argument("source", metavar="SOURCE")
    retire.add_argument(
        "app", nargs="?", metavar="APP", help="find the storage of this application"
    )
    _storage(retire)
    retire.add_argument(
        "--why", default="the source will not return", help="reason, logged with the decision"
    )

    audit = _command(
        commands, "audit", "compare what clients received with the ideal output", _audit
    )
    _app(audit)
    _storage(audit)
    audit.add_argument("--json", metavar="FILE", help="write the report to FILE, - for stdout")
    _master(audit)

    experiment = _command(
        commands, "experiment", "run a measurement and compare it with the papers", _experiment
    )
    experiment.add_argument("name", metavar="NAME", help="an experiment, or `list`")
    experiment.add_argument("--quick", action="store_true", help="short version, for everyday use")
    experiment.add_argument(
        "--json", metavar="FILE", help="write the figures to FILE, - for stdout"
    )
    experiment.add_argument("--plots", metavar="DIR", help="write the plots to DIR as PNG")

    simulate = _command(
        commands, "simulate", "run the protocols in virtual time, with random faults", _simulate
    )
    selection = simulate.add_mutually_exclusive_group()
    selection.add_argument(
        "--seed", type=int, metavar="N", help="run one seed and print its transcript"
    )
    selection.add_argument("--seeds", metavar="A..B", help="run many seeds (default: 1..50)")
    selection.add_argument(
        "--scenario", metavar="SCENARIO", help="run a scenario of `holdfast chaos`, or a .toml file"
    )
    simulate.add_argument(
        "--only", choices=["cec"], help="of every seed, the scenario with eventual checkpoints"
    )
    simulate.add_argument("--json", metavar="FILE", help="write the verdicts to FILE, - for stdout")
    simulate.add_argument(
        "--history", metavar="FILE", help="with --seed or --scenario: write the events to FILE"
    )

    chaos = _command(
        commands,
        "chaos",
        "inject faults into a network of real processes, and judge its results",
        _chaos,
    )
    chaos.add_argument(
        "scenario",
        nargs="?",
        metavar="SCENARIO",
        help="a name or a .toml file (default: list the names)",
    )
    chaos.add_argument("--json", metavar="FILE", help="write the verdicts to FILE, - for stdout")
    chaos.add_argument("--history", metavar="FILE", help="write the events to FILE")

    verify = _command(commands, "verify", "test the engine of this machine", None)
    tests = verify.add_subparsers(metavar="TEST", required=True)
    fuzz = _command(
        tests, "fuzz", "compute random networks in many ways, and compare with an oracle", _fuzz
    ).add_argument
    fuzz("--networks", type=int, default=100, metavar="N", help="how many (default: %(default)s)")
    fuzz(
        "--seed", type=int, default=1, metavar="S", help="seed of the first (default: %(default)s)"
    )
    fuzz("--minutes", type=float, metavar="M", help="stop after this time")
    fuzz(
        "--deployments", type=int, default=100, metavar="N",
        help="run every Nth network also as processes; 0: none (default: %(default)s)",
    )  # fmt: skip
    fuzz("--case", metavar="FILE", help="run a case that a failed test has written")
    fuzz("--json", metavar="FILE", help="write counts and coverage to FILE, - for stdout")

    about = "mean time to failure of a cluster that runs everything in two replicas"
    mttf = _command(commands, "reliability", about, _reliability).add_argument
    mttf("layout", metavar="LAYOUT", help="a .toml file: nodes, node_mttf, repair")
    mttf("--runs", type=int, metavar="N", help="number of simulated runs (default: 40000)")
    mttf(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the random numbers (default: %(default)s)",
    )
    mttf(
        "--as-paper",
        action="store_true",
        help="as in the paper: only the primary of a pair can fail first",
    )
    mttf("--constant-repair", action="store_true", help="simulate repairs of constant duration")
    mttf("--json", metavar="FILE", help="write the figures to FILE, - for stdout")

    version = _command(
        commands, "version", "print the versions of Holdfast, Spark, Arrow and Python", _version
    )
    version.set_defaults(call=_version)
    return top


def _command(commands: Any, name: str, help: str, call: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help + ".")
    parser.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show stack traces and Spark's own log",
    )
    parser.set_defaults(call=call)
    return parser


def _positive(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, such as 30, found {text!r}")
    return seconds


def _app(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("app", metavar="APP", help="path/to/app.py or package.module:network")


def _storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage", metavar="DIR", help="folder of the logs (default: holdfast-data/NETWORK)"
    )


def _master(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master", default="local[2]", help="Spark master URL (default: %(default)s)"
    )
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a Spark setting, such as spark.executor.cores=4; may be repeated",
    )


def _load(args: argparse.Namespace, options: Options) -> tuple[Any, Any]:
    """Start Spark, then load the application: applications may build Columns, which need Spark."""
    from holdfast.engine import session
    from holdfast.model.loading import load

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the JVM, too
    sessions = session.start(options)
    return sessions, load(args.app)


def _folder(args: argparse.Namespace, network: Any = None) -> str:
    from holdfast.cli.find import storage_of

    return storage_of(args.storage, network, getattr(args, "app", None))


def _run(args: argparse.Namespace) -> int:
    from holdfast.cli.live import run_live

    options = Options(
        master=args.master,
        spark=parse_settings(args.conf),
        hosts=args.hosts,
        standby=args.standby,
        memory=args.memory,
        fsync=args.fsync,
        recovery=args.recovery,
        checkpoint_buckets=args.checkpoint_buckets,
        archive=not args.no_archive,
        port=args.port,
        metrics_port=args.metrics_port,
        buffer_buckets=args.buffer_buckets,
    )
    if args.audit and args.no_archive:
        raise HoldfastError("--audit needs the archive; remove --no-archive")
    return run_live(args, options)


def _check(args: argparse.Namespace) -> int:
    from holdfast.cli.show import show_network
    from holdfast.engine.compiled import compile_network

    sessions, network = _load(args, Options(master=args.master, spark=parse_settings(args.conf)))
    compiled = compile_network(network, sessions.small)
    show_network(network, compiled)
    return 0


def _status(args: argparse.Namespace) -> int:
    from holdfast.cli.find import ask
    from holdfast.cli.status_view import show_status
    from holdfast.streams.calls import GetStatus

    status = ask(_folder(args), GetStatus()).body
    show_status(status, as_json=args.json)
    failed = (
        any(failure["permanent"] for failure in status["failures"])
        or status["stopped"]
        or any(part["out"] for part in status["unhealthy"])
    )
    return 1 if failed or any(node.get("failure") for node in status["nodes"]) else 0


def _tail(args: argparse.Namespace) -> int:
    from holdfast.cli.tail import tail

    return tail(_folder(args), args.output, args.json, args.buckets, args.all)


def _dead(args: argparse.Namespace) -> int:
    from holdfast.cli.list_dead_letters import dead_letters

    return dead_letters(_folder(args), args.source, args.rows or None, as_json=args.json)


def _retire(args: argparse.Namespace) -> int:
    from holdfast.cli.find import ask
    from holdfast.streams.calls import Retire

    retired = ask(_folder(args), Retire(args.source, args.why))
    print(
        f"source {args.source} retired: from bucket {retired.from_bucket} on, all consumers "
        "continue without this source"
    )
    return 0


def _restart(args: argparse.Namespace) -> int:
    from holdfast.cli.live import restart

    return restart(_folder(args), args.host)


def _audit(args: argparse.Namespace) -> int:
    from holdfast.cli.show import show_report

    sessions, network = _load(args, Options(master=args.master, spark=parse_settings(args.conf)))
    from holdfast.storage.root import read_marker
    from holdfast.verify.audit import audit

    folder = _folder(args, network)
    if read_marker(folder) is None:
        raise HoldfastError(
            f"expected the storage of a run of {network.name!r}, found none in {folder}; name it "
            "with --storage DIR, or start a run: holdfast run APP"
        )
    report = audit(network, folder, sessions.large)
    show_report(report, args.json)
    return 0 if report.ok else 1


def _experiment(args: argparse.Namespace) -> int:
    from holdfast.experiments import run_experiment

    return run_experiment(args.name, quick=args.quick, json_to=args.json, plots=args.plots)


def _simulate(args: argparse.Namespace) -> int:
    from holdfast.cli.simulate import run_simulate

    return run_simulate(
        seed=args.seed, seeds=args.seeds, json_to=args.json, history_to=args.history,
        scenario=args.scenario, only=args.only,
    )  # fmt: skip


def _chaos(args: argparse.Namespace) -> int:
    from holdfast.cli.chaos import run_chaos

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run_chaos(args.scenario, json_to=args.json, history_to=args.history)


def _fuzz(args: argparse.Namespace) -> int:
    from holdfast.cli.fuzz import run_fuzz

    return run_fuzz(
        networks=args.networks, seed=args.seed, minutes=args.minutes, case=args.case,
        deployments=args.deployments, json_to=args.json,
    )  # fmt: skip


def _reliability(args: argparse.Namespace) -> int:
    from holdfast.cli.mttf import run_reliability

    return run_reliability(args)


def _version(args: argparse.Namespace) -> int:
    import platform

    import pyarrow
    import pyspark

    print(
        f"holdfast {__version__} (pyspark {pyspark.__version__}, pyarrow {pyarrow.__version__}, "
        f"Python {platform.python_version()})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
