"""Classifies the errors of a step: caused by the storage or by the application, and where.

The cause determines the reaction: a step is retried while the storage is full, lost storage is
rebuilt, and a query that fails on its rows must be repaired by the user. Spark reports all of these
errors as text.
"""

from __future__ import annotations

import errno
import re

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from holdfast import errors
from holdfast.engine.determinism import brief
from holdfast.engine.user_errors import location_in, location_of_functions, raised_in
from holdfast.errors import (
    HoldfastError,
    InputError,
    LogError,
    StorageFull,
    TooLarge,
    UserFunctionError,
)
from holdfast.model.fragments import Path
from holdfast.storage.files import storage_error

#: Storage error of Holdfast that was raised in a Python worker.
_OURS = re.compile(
    r"\bholdfast\.errors\.(StorageFull|StorageDenied|StorageLost|LogCorrupted|LogError)\b"
)
#: Messages for a full disk. The file need not be in the storage of the node: Spark writes temporary
#: files elsewhere.
_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
#: Spark's message if the results of a job exceed `spark.driver.maxResultSize`.
_TOO_LARGE = "Total size of serialized results"
#: The class of an exception, not a value that the query has read.
_OUT_OF_MEMORY = re.compile(
    r"(?:^|Caused by: |: )(?:[\w$]+\.)*\w*OutOf(?:Direct)?Memory(?:Error|Exception)\b", re.MULTILINE
)
#: Error messages of Spark and the JVM about files in the storage of the node, and their errno. The
#: JVM raises FileNotFoundException for other causes too and then names the cause, so causes are
#: first.
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
    """Translate an error of a step. `folder`: the state folder of the node."""
    if isinstance(err, HoldfastError):
        return err
    where = f"path {path.name!r}, buckets {lo} to {hi}"
    text = f"{where}: {raised_in(str(err)) or brief(err)}"
    if (cause := _storage_error(err, folder)) is not None:
        if isinstance(cause, StorageFull):
            return StorageFull(
                f"{text.rstrip('.')}: no space left in the storage or in Spark's temporary folder; "
                "free space, then the step is retried"
            )
        return type(cause)(f"{where}: {cause}")
    if is_too_large(err, can_be_split=lo < hi):
        return TooLarge(f"{where}: the results do not fit the memory of the driver")
    if not isinstance(err, PySparkException):
        return err
    functions = [fn for op in path.operators if (fn := getattr(op, "fn", None)) is not None]
    location = location_in(str(err)) or location_of_functions(functions)
    if location is None:
        return InputError(text)
    return UserFunctionError(f"{text}, at {location}", location)


def is_too_large(err: Exception, *, can_be_split: bool) -> bool:
    """Whether a job failed because it was too large. Lack of memory may have other causes, so it
    counts only if smaller jobs can be tried."""
    text = str(err)
    if not isinstance(err, PySparkException | Py4JJavaError) or raised_in(text) is not None:
        return False
    return _TOO_LARGE in text or (can_be_split and _OUT_OF_MEMORY.search(text) is not None)


def _storage_error(err: Exception, folder: str) -> LogError | None:
    """The storage error that caused `err`; None if the cause is not the storage."""
    if isinstance(err, OSError):
        error = storage_error(err, folder)
        in_storage = str(err.filename or "").startswith(folder)
        return error if in_storage or isinstance(error, StorageFull) else None
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
