"""The folder of a run: its owner, its identity, and its deletion.

    <root>/network.json                 marks storage of Holdfast, with the identity of the query
    <root>/lock                         held by the run
    <root>/run.json                     address of the run, while the run is live
    <root>/controller, sources/*, clients/*, nodes/HOST, nodes/HOST/NODE      logs (`store`)

A query other than that of `network.json` is refused before anything is written: a log with windows
of two queries would hold correct results of neither. Each log also records a digest of its query,
so that a log copied from another run is detected.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from holdfast.errors import IdentityMismatch, SetupError, StorageDenied, StorageInUse
from holdfast.model.identity import Identity, library_differences, listed, query_differences
from holdfast.storage import folder
from holdfast.storage.disk import OS_DISK, TEMPORARY
from holdfast.storage.files import make_folder, put_file, storage
from holdfast.storage.reading import read_only
from holdfast.types import FORMAT

MARKER = "network.json"
LOCK = "lock"
#: Folder of the controller, and its name as a producer in `Run.route`.
CONTROLLER = "controller"
#: Every path that a run may create in its storage; folders end with a slash.
_OURS = re.compile(
    r"""
    (network|run)\.json(\.tmp)? | lock | spark\.log | (sources|clients|nodes)/
    | nodes/[^/]+\.log | nodes/[^/]+\.warm(-warm)?/.*
    | (controller | (sources|clients|nodes)/[^/]+ | nodes/[^/]+/[^/]+)/   # logs
      (manifest[^/]* | lock | mark(\.tmp)? | (segments|state|state-warm|inputs|read-stream)/.*)?
    """,
    re.VERBOSE,
)


class StorageRoot:
    """The locked storage of one run."""

    def __init__(self, path: str, lock: int, *, is_new: bool) -> None:
        self.path = path
        self._lock: int | None = lock
        #: No run had used the folder before.
        self.is_new = is_new

    @classmethod
    def take(
        cls, path: str, identity: Identity, *, fsync: bool, accept_versions: bool = False
    ) -> StorageRoot:
        """Locks the storage for a run of that identity. Raises an error with the reason and changes
        nothing if the storage belongs to another identity."""
        make_folder(path, fsync=fsync)
        lock = _locked(path, LOCK)
        try:
            recorded = read_marker(path)
            is_new = recorded is None and not os.path.exists(os.path.join(path, CONTROLLER))
            if recorded is None:
                _compare_log(path, identity)
            else:
                _compare(path, recorded, identity, accept_versions)
            if recorded != identity:
                _write(path, identity.body(), fsync=fsync)
        except BaseException:
            OS_DISK.unlock(lock)
            raise
        return cls(path, lock, is_new=is_new)

    def forget(self) -> None:
        """Undo `take` of a new storage, before anything was computed: the storage is not bound to a
        query that was refused. The caller has made sure that no source has rows. Text files of the
        hosts remain."""
        if self.is_new:
            with storage(self.path):
                for name in (CONTROLLER, "sources", "clients"):
                    shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)
                os.unlink(os.path.join(self.path, MARKER))

    def release(self) -> None:
        if self._lock is not None:
            OS_DISK.unlock(self._lock)
            self._lock = None


def read_marker(path: str) -> Identity | None:
    """The identity that a storage belongs to; None if the folder has no marker (yet)."""
    body = _marker(path)
    if body is not None and body.get("deleting"):
        raise SetupError(
            f"{path}: --fresh was interrupted while it deleted this storage; run with --fresh again"
        )
    return None if body is None else Identity.of(body, os.path.join(path, MARKER))


def _marker(path: str) -> dict[str, Any] | None:
    file = os.path.join(path, MARKER)
    with storage(file):
        if not os.path.exists(file):
            return None
        data = OS_DISK.read(file)
    try:
        body: dict[str, Any] = json.loads(data)
        version = body.pop("holdfast")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise SetupError(
            f"{file}: expected a marker file of Holdfast, found foreign or damaged content; "
            "restore the file from a backup, or delete it: the query is then checked against the "
            "log of the controller"
        ) from None
    if version != FORMAT:
        raise SetupError(
            f"{file}: expected format {FORMAT}, found {version}; use the version of Holdfast that "
            "wrote it"
        )
    return body


def delete_storage(path: str) -> list[str]:
    """Deletes the contents of an unused storage of Holdfast; returns the names of the entries.

    The folder and its lock file remain. Nothing is deleted if the folder contains any other file.
    """
    if not os.path.lexists(path):
        return []
    if not os.path.isdir(path):
        raise StorageDenied(
            f"--fresh: expected a folder, but {path} is a file; nothing was deleted"
        )
    with storage(path):
        names = sorted(os.listdir(path))
        paths = list(_inside(path))
    if set(names) <= {LOCK, MARKER + TEMPORARY}:
        return []
    if _marker(path) is None:
        raise _refused(path, f"it has no {MARKER}", names)
    if foreign := [name for name in paths if not _OURS.fullmatch(name)]:
        raise _refused(path, "it contains files that Holdfast did not write", foreign)
    locks = [name for name in paths if os.path.basename(name) == LOCK]
    with storage(path), ExitStack() as stack:
        for name in dict.fromkeys([LOCK, *locks]):
            stack.callback(OS_DISK.unlock, _locked(path, name))
        _write(path, {"deleting": True}, fsync=True)
        deleted = [name for name in names if name not in (LOCK, MARKER)]
        for name in deleted:
            inner = os.path.join(path, name)
            shutil.rmtree(inner) if os.path.isdir(inner) else os.unlink(inner)
        os.unlink(os.path.join(path, MARKER))
    return deleted


def _compare(path: str, recorded: Identity, identity: Identity, accept_versions: bool) -> None:
    if changed := query_differences(recorded, identity):
        raise IdentityMismatch(
            f"{path} holds the results of another query:{listed(changed)}\n"
            "Return to that query, give this one another storage (storage=, --storage), or delete "
            "the old results (delete the folder, or use --fresh)"
        )
    changed = library_differences(recorded, identity)
    if changed and not accept_versions:
        raise IdentityMismatch(
            f"{path} was written with other versions:{listed(changed)}\n"
            "Results may differ in their last bits. Install the old versions, or start once with "
            "accept_versions=True (--accept-versions) to continue with these"
        )


def _compare_log(path: str, identity: Identity) -> None:
    """If the marker was lost, compare the query digest in the controller's log instead."""
    log = os.path.join(path, "controller")
    if not os.path.exists(os.path.join(log, folder.MANIFEST)):
        return
    if (query := read_only(log).state.query) not in ("", identity.digest):
        raise IdentityMismatch(
            f"{path} holds the results of another query: expected {identity.digest}, found "
            f"{query} in {log} ({MARKER} is missing). Return to that query, or give this one "
            "another storage (storage=, --storage)"
        )


def _write(path: str, body: dict[str, Any], *, fsync: bool) -> None:
    text = json.dumps({"holdfast": FORMAT, **body}, indent=1)
    put_file(os.path.join(path, MARKER), text.encode(), fsync=fsync)


def _locked(path: str, name: str) -> int:
    file = os.path.join(path, name)
    with storage(file):
        try:
            return OS_DISK.lock(file)
        except BlockingIOError:
            pid = OS_DISK.read(file)[:32].decode(errors="replace").strip() or "unknown"
            raise StorageInUse(
                f"{path} is in use by process {pid} ({name}); stop that run, or use another "
                "storage (storage=, --storage). Hosts of a killed run terminate by themselves "
                "within 10 s"
            ) from None


def _refused(path: str, why: str, names: list[str]) -> StorageDenied:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return StorageDenied(
        f"--fresh: expected storage of Holdfast in {path}, but {why} (found: {shown}); nothing was "
        "deleted. Choose another --storage, or delete the files of the folder by hand"
    )


def _inside(path: str) -> Iterator[str]:
    """All paths below the root; folders end with a slash. Links are listed but not followed."""
    for inner, folders, files in os.walk(path, onerror=_raise):
        for name in sorted([*folders, *files]):
            full = os.path.join(inner, name)
            own = os.path.relpath(full, path)
            if os.path.islink(full):
                yield f"{own} is a link"
            else:
                yield f"{own}/" if name in folders else own


def _raise(err: OSError) -> None:
    raise err
