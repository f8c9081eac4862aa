"""Locates errors in the application: the file and line of the user's function.

A user's function runs in this process (DataFrame code) or in a Python worker of Spark, whose
traceback arrives as text. Expressions fail in the JVM, which records where they were written. In
all three cases, the frames of Python, Spark and Holdfast do not help the user and are skipped.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable
from types import CodeType

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_EXAMPLES = os.path.join(_OURS, "examples") + os.sep
#: Path fragments of installed code. Also matches paths on executors, whose folders differ.
_INSTALLED = (
    "/site-packages/", "/dist-packages/", "/lib/python3.", "/python/pyspark/", "/pyspark.zip/",
    "/holdfast/engine/", "/holdfast/storage/", "<frozen ",
)  # fmt: skip
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(?P<file>.+?)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_CALLED_FROM = re.compile(r"was called from\n(?P<file>.+):(?P<line>\d+)\s*$", re.MULTILINE)
#: The location in an error message of Holdfast.
_TOLD = re.compile(r", at (?P<where>\S[^\n]*?(?:\.py|>):\d+(?: in [\w<>]+)?)")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
TEXT_MAX = 400


def is_users(file: str) -> bool:
    """Whether a file may belong to the application."""
    if file.startswith(_OURS):
        return file.startswith(_EXAMPLES)
    return not any(part in file for part in _INSTALLED)


def location_of(err: BaseException) -> str | None:
    """The innermost application line in the traceback of an exception or of its causes."""
    error: BaseException | None = err
    while error is not None:
        if (location := getattr(error, "location", None)) is not None:
            return str(location)
        frames = traceback.extract_tb(error.__traceback__)
        for frame in reversed(frames):
            if is_users(frame.filename):
                return _where(frame.filename, frame.lineno or 0, frame.name)
        error = error.__cause__
    return None


def location_in(text: str) -> str | None:
    """The same for an error text of a Python worker, of the JVM or of Holdfast."""
    for match in reversed([*_FRAME.finditer(text)]):
        if is_users(match["file"]):
            return _where(match["file"], int(match["line"]), match["name"])
    for match in _CALLED_FROM.finditer(text):
        if is_users(match["file"]):
            return _where(match["file"], int(match["line"]), None)
    reported = _TOLD.search(text)
    return None if reported is None else reported["where"]


def location_of_functions(functions: Iterable[Callable[..., object]]) -> str | None:
    """The location of the only application function in `functions`; None unless there is exactly
    one."""
    names = {}
    for fn in functions:
        code = getattr(fn, "__code__", None)
        if isinstance(code, CodeType) and is_users(code.co_filename):
            names[code.co_filename, code.co_firstlineno] = code.co_name
    if len(names) != 1:
        return None
    (((file, line), name),) = names.items()
    return _where(file, line, name)


def raised_in(text: str) -> str | None:
    """The exception that a Python worker raised, in one line; None if the text is not from a Python
    worker. For a Holdfast error only the message, which is written for the user."""
    _, separator, last = text.rpartition(_TRACEBACK)
    if not separator:
        return None
    lines = last.partition("\n\nJVM stacktrace:")[0].strip("\n").splitlines()
    raised = next((n for n, line in enumerate(lines) if line and not line[0].isspace()), None)
    if raised is None or (match := _RAISED.match(lines[raised])) is None:
        return None
    name, rest = match[1], [match[2] or "", *lines[raised + 1 :]]
    text = " ".join(" ".join(rest).split())[:TEXT_MAX]
    if name.startswith("holdfast.errors."):
        return text
    return f"{name}: {text}" if text else name


def _where(file: str, line: int, name: str | None) -> str:
    return f"{file}:{line}" if name is None else f"{file}:{line} in {name}"
