"""Environments of the systems that Holdfast is compared with: one for each, with pinned packages.

An environment is built once, in the user's cache folder, and used again while its list of packages
stays the same. Flink also gets a source for Parquet files, compiled against its jars: the package
has no Parquet format, and Spark's jars have the reader.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import SetupError

SCRIPTS = Path(__file__).parent / "peers"
INSTALL_S = 900
_FACTORY = "META-INF/services/org.apache.flink.table.factories.Factory"
_READER_JARS = ("parquet-*.jar", "hadoop-client-*.jar", "snappy-java-*.jar", "jts-core-*.jar")


def cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "holdfast" / "peers"


def environment(name: str, say: Callable[[str], None]) -> str:
    """The interpreter of a peer. Raises `SetupError` if the packages cannot be installed."""
    wanted = SCRIPTS / f"{name}.txt"
    folder = cache_folder() / name
    python, done = folder / "bin" / "python", folder / "installed"
    fingerprint = hashlib.sha256(wanted.read_bytes() + sys.version.encode()).hexdigest()
    if done.exists() and done.read_text() == fingerprint:
        return str(python)
    say(f"{name}: installing into {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    # Some packages of Flink are built from source and need setuptools.
    for arguments in (["setuptools<81", "wheel"], ["--no-build-isolation", "-r", str(wanted)]):
        _pip(name, str(python), arguments)
    done.write_text(fingerprint)
    return str(python)


def _pip(name: str, python: str, arguments: list[str]) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise SetupError(f"{name}: pip took longer than {INSTALL_S} s") from None
    except subprocess.CalledProcessError as err:
        lines = [line for line in err.stderr.splitlines() if "ERROR" in line] or [""]
        raise SetupError(f"{name}: pip failed: {lines[-1]}") from None


def flink_classpath(python: str, folder: Path) -> str:
    """Compile the Parquet source of Flink; the class path with it and the readers of Spark."""
    import pyspark

    javac = shutil.which("javac", path=_java_path())
    if javac is None:
        raise SetupError("flink: its Parquet source needs a JDK (javac), and there is only a JRE")
    jars = Path(pyspark.__file__).parent / "jars"
    readers = [str(jar) for pattern in _READER_JARS for jar in sorted(jars.glob(pattern))]
    (flink,) = Path(python).parents[1].glob("lib/python*/site-packages/pyflink/lib")
    classes = folder / "classes"
    (classes / _FACTORY).parent.mkdir(parents=True)
    (classes / _FACTORY).write_text("peers.BucketTable\n")
    sources = [str(source) for source in sorted(SCRIPTS.glob("*.java"))]
    compiled = subprocess.run(
        [javac, "-nowarn", "-cp", os.pathsep.join([f"{flink}/*", *readers]), "-d", str(classes),
         *sources], capture_output=True, text=True,
    )  # fmt: skip
    if compiled.returncode:
        raise SetupError(f"flink: javac failed: {compiled.stderr.strip().splitlines()[:1]}")
    return os.pathsep.join([str(classes), *readers])


def _java_path() -> str:
    home = os.environ.get("JAVA_HOME")
    return os.pathsep.join([*([f"{home}/bin"] if home else []), os.environ.get("PATH", "")])
