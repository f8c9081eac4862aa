"""The code of a function as text that formatting does not change.

Where the source is at hand, and is what was compiled, its syntax tree is taken: comments, line
breaks, quotes, docstrings and the place in the file are not in it. Without a source (a prompt,
`exec`) it is the bytecode, in which the compiler lets some line breaks show.
"""

from __future__ import annotations

import ast
import copy
import dis
import linecache
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Instructions that do nothing, or whose number depends on line breaks.
_NOISE = {"NOP", "CACHE", "EXTENDED_ARG", "RESUME", "PRECALL", "MAKE_CELL", "COPY_FREE_VARS"}
#: *args and **kwargs.
_STARRED = 0x04 | 0x08


class _Source(NamedTuple):
    tree: ast.Module
    #: Everything that was compiled from it.
    codes: frozenset[CodeType]


def code_text(code: CodeType, text: Callable[[Any], str]) -> str:
    """`text` describes constants, where there is bytecode alone."""
    node = _node(code)
    return "\n".join(_bytecode(code, text)) if node is None else _dumped(node)


def module_text(file: str) -> str | None:
    """A whole file; None if it cannot be read."""
    source = _source(file)
    return None if source is None else _dumped(source.tree)


def nested(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of all functions, classes and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def instructions(code: CodeType) -> list[dis.Instruction]:
    return [one for one in dis.get_instructions(code) if one.opname not in _NOISE]


def _source(file: str) -> _Source | None:
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)), file)


@lru_cache(maxsize=64)
def _parsed(text: str, file: str) -> _Source | None:
    try:
        code = compile(text, file, "exec", dont_inherit=True)
        return _Source(ast.parse(text), frozenset(nested(code))) if text else None
    except (SyntaxError, ValueError):
        return None


def _node(code: CodeType) -> ast.Lambda | _Function | None:
    """Where the code was written; None if nobody can tell, or the file was changed since."""
    source = _source(code.co_filename)
    if source is None or code not in source.codes:
        return None
    line, name = code.co_firstlineno, code.co_name
    found: list[ast.Lambda | _Function] = []
    for node in ast.walk(source.tree):
        if isinstance(node, _Function) and node.name == name:
            first = min(one.lineno for one in (node, *node.decorator_list))
            found += [node] if first == line else []
        elif isinstance(node, ast.Lambda) and name == "<lambda>" and node.lineno == line:
            found += [node] if _inside(code, node.body) else []
    if name != "<lambda>" and len(found) > 1:
        return None
    return found[-1] if found else None  # of lambdas inside each other the innermost comes last


def _inside(code: CodeType, body: ast.expr) -> bool:
    """Whether all instructions come from this expression."""
    assert body.end_lineno is not None and body.end_col_offset is not None
    begin, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    for one in dis.get_instructions(code):
        at = one.positions
        if at is None or None in (at.lineno, at.end_lineno, at.col_offset, at.end_col_offset):
            return False  # such as with `python -X no_debug_ranges`
        assert at.lineno and at.end_lineno and at.end_col_offset is not None
        if at.end_col_offset == 0:
            continue  # of the function itself
        assert at.col_offset is not None
        if not begin <= (at.lineno, at.col_offset) <= (at.end_lineno, at.end_col_offset) <= end:
            return False
    return True


def _dumped(top: ast.AST) -> str:
    """The tree without places and docstrings. As source: the form of trees themselves changes from
    one Python to the next."""
    top = copy.deepcopy(top)
    for node in ast.walk(top):
        if isinstance(node, _Function | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.unparse(top)


def _bytecode(code: CodeType, text: Callable[[Any], str]) -> Iterator[str]:
    """One line per instruction, with what its argument stands for."""
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield f"{named} {code.co_posonlyargcount} {code.co_argcount} {code.co_flags & _STARRED}"
    kept = instructions(code)
    place = {one.offset: number for number, one in enumerate(kept)}
    for one in kept:
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            target = min((offset for offset in place if offset >= one.argval), default=-1)
            yield f"{one.opname} {place.get(target)}"
        elif isinstance(one.argval, CodeType):
            yield one.opname
            yield from _bytecode(one.argval, text)
        else:
            yield f"{one.opname} {text(one.argval)}"
    yield code.co_exceptiontable.hex()
