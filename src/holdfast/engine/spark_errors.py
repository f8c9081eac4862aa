"""What a failed step tells: whether the storage is to blame or the application, and where.

The difference decides what becomes of the node: storage that is full is waited for, storage that is
gone is rebuilt, and a query that fails on its rows waits for a person. Spark hands on all of them
as text.
"""

from __future__ import annotations

import errno
import re

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from holdfast import errors
from holdfast.engine.determinism import brief
from holdfast.engine.user_errors import location_in, location_of_functions, raised_in
from holdfast.errors import HoldfastError, InputError, LogError, StorageFull, UserFunctionError
from holdfast.model.fragments import Path
from holdfast.storage.files import storage_error

#: What a Python worker of ours raised.
_OURS = re.compile(
    r"\bholdfast\.errors\.(StorageFull|StorageDenied|StorageLost|LogCorrupted|LogError)\b"
)
#: Spark has files of its own elsewhere, and they too can find no space.
_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
#: What Spark and the JVM say of files in the storage of the node, and the number of it. The JVM
#: says that a file was not found for whatever reason, and then the reason.
_WORDS = {
    "Permission denied": errno.EACCES,
    "Read-only file system": errno.EROFS,
    "Not a directory": errno.ENOTDIR,
    "Mkdirs failed to create": errno.EACCES,
    "Input/output error": errno.EIO,
    "FAILED_READ_FILE": errno.EIO,
    "No such file or directory": errno.ENOENT,
    "PATH_NOT_FOUND": errno.ENOENT,
    "FILE_NOT_EXIST": errno.ENOENT,
    "FileNotFoundException": errno.ENOENT,
    "NoSuchFileException": errno.ENOENT,
}


def error_of_step(err: Exception, path: Path, lo: int, hi: int, folder: str) -> Exception:
    """The error to raise for one that a step raised; `folder` holds the state of the node."""
    if isinstance(err, HoldfastError):
        return err
    where = f"path {path.name!r}, buckets {lo} to {hi}"
    text = f"{where}: {raised_in(str(err)) or brief(err)}"
    if (trouble := _storage_error(err, folder)) is not None:
        if isinstance(trouble, StorageFull):
            return StorageFull(f"no space left for a step; free some, it is run again. {text}")
        return type(trouble)(f"{where}: {trouble}")
    if not isinstance(err, PySparkException):
        return err
    functions = [fn for op in path.operators if (fn := getattr(op, "fn", None)) is not None]
    location = location_in(str(err)) or location_of_functions(functions)
    if location is None:
        return InputError(text)
    return UserFunctionError(f"{text}, at {location}", location)


def _storage_error(err: Exception, folder: str) -> LogError | None:
    """What is wrong with the storage; None if it is something else."""
    if isinstance(err, OSError):
        found = storage_error(err, folder)
        mine = str(err.filename or "").startswith(folder)
        return found if mine or isinstance(found, StorageFull) else None
    if not isinstance(err, PySparkException | Py4JJavaError):
        return None
    text = str(err)
    if (ours := _OURS.search(text)) is not None:
        return getattr(errors, ours[1])(raised_in(text) or ours[0])  # type: ignore[no-any-return]
    if any(words in text for words in _FULL):
        return StorageFull(folder)
    if folder not in text or raised_in(text) is not None:
        return None
    for words, number in _WORDS.items():
        if words in text:
            file = re.search(rf"{re.escape(folder)}[^\s:,)]*", text)
            return storage_error(OSError(number, ""), folder if file is None else file[0])
    return None
