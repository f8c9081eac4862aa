"""The code of a function as text that does not depend on formatting.

If the source file is available and unchanged since compilation, the text is derived from the syntax
tree: comments, line breaks, quotes, docstrings and the location in the file have no influence.
Without a source (a prompt, `exec`), the text is derived from the bytecode, which depends on some
line breaks.
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
#: Instructions without effect, or whose number depends on line breaks.
_NOISE = {"NOP", "CACHE", "EXTENDED_ARG", "RESUME", "PRECALL", "MAKE_CELL", "COPY_FREE_VARS"}
#: Code flags for *args and **kwargs.
_STARRED = 0x04 | 0x08


class _Source(NamedTuple):
    tree: ast.Module
    #: All code objects compiled from the file.
    codes: frozenset[CodeType]


def code_text(code: CodeType, text: Callable[[Any], str]) -> str:
    """The text of a code object. `text` describes constants if only the bytecode is available."""
    node = _node(code)
    return "\n".join(_bytecode(code, text)) if node is None else _dumped(node)


def module_text(file: str) -> str | None:
    """The text of a whole file; None if the file cannot be read or parsed."""
    source = _source(file)
    return None if source is None else _dumped(source.tree)


def nested(code: CodeType) -> Iterator[CodeType]:
    """The code object and those of all functions, classes and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def instructions(code: CodeType) -> list[dis.Instruction]:
    return [op for op in dis.get_instructions(code) if op.opname not in _NOISE]


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
    """The syntax node of the code; None if ambiguous, or if the file changed after compilation."""
    source = _source(code.co_filename)
    if source is None or code not in source.codes:
        return None
    line, name = code.co_firstlineno, code.co_name
    candidates: list[ast.Lambda | _Function] = []
    for node in ast.walk(source.tree):
        if isinstance(node, _Function) and node.name == name:
            first = min(definition.lineno for definition in (node, *node.decorator_list))
            candidates += [node] if first == line else []
        elif isinstance(node, ast.Lambda) and name == "<lambda>" and node.lineno == line:
            candidates += [node] if _inside(code, node.body) else []
    if name != "<lambda>" and len(candidates) > 1:
        return None
    return candidates[-1] if candidates else None  # the innermost of nested lambdas is the last


def _inside(code: CodeType, body: ast.expr) -> bool:
    """Whether the source positions of all instructions lie in this expression."""
    assert body.end_lineno is not None and body.end_col_offset is not None
    begin, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    for op in dis.get_instructions(code):
        at = op.positions
        if at is None or None in (at.lineno, at.end_lineno, at.col_offset, at.end_col_offset):
            return False  # for example with `python -X no_debug_ranges`
        assert at.lineno and at.end_lineno and at.end_col_offset is not None
        if at.end_col_offset == 0:
            continue  # belongs to the function, not to its body
        assert at.col_offset is not None
        if not begin <= (at.lineno, at.col_offset) <= (at.end_lineno, at.end_col_offset) <= end:
            return False
    return True


def _dumped(top: ast.AST) -> str:
    """The tree as source text, without positions and docstrings. Source text, because the format of
    dumped trees differs between Python versions."""
    top = copy.deepcopy(top)
    for node in ast.walk(top):
        if isinstance(node, _Function | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.unparse(top)


def _bytecode(code: CodeType, text: Callable[[Any], str]) -> Iterator[str]:
    """One line per instruction, with its resolved argument."""
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield f"{named} {code.co_posonlyargcount} {code.co_argcount} {code.co_flags & _STARRED}"
    listing = instructions(code)
    number_at = {op.offset: number for number, op in enumerate(listing)}
    for op in listing:
        if op.opcode in dis.hasjrel or op.opcode in dis.hasjabs:
            target = min((offset for offset in number_at if offset >= op.argval), default=-1)
            yield f"{op.opname} {number_at.get(target)}"
        elif isinstance(op.argval, CodeType):
            yield op.opname
            yield from _bytecode(op.argval, text)
        else:
            yield f"{op.opname} {text(op.argval)}"
    yield code.co_exceptiontable.hex()
