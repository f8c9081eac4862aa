"""Fingerprints of values and functions: texts that are equal in every process for equal values.

The fingerprint of a function covers its code and everything the code refers to: closure, defaults
and globals, including, recursively, the functions and classes of the application that it calls.
Code of installed libraries is represented by its name and by the version of the library
(`libraries`). The text does not depend on the hash seed, the order of sets, or the name and
location of a file.

Short texts remain readable. Long texts are shortened to a prefix and a digest.
"""

from __future__ import annotations

import copyreg
import enum
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from itertools import takewhile
from pathlib import Path
from typing import Any

from holdfast.model.source_code import code_text, instructions, module_text, nested

#: Longest text, in characters, that is not shortened to a digest.
SHORT = 120
_SCALARS = (type(None), type(...), bool, int, float, complex, str, bytes)
_NAMED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
#: Class attributes that are not part of the fingerprint: location, documentation, derived values.
_ABOUT = {
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__",
    "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl",
    "__dataclass_fields__", "__dataclass_params__", "__match_args__",
}  # fmt: skip
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
_DUNDER = re.compile(r"__\w+__")
_OURS = str(Path(__file__).parents[1]) + os.sep
#: Folders of this package that hold applications, whose code is fingerprinted like user code.
_APPLICATIONS = tuple(f"{_OURS}{name}{os.sep}" for name in ("examples", "experiments", "verify"))
_STDLIB = sysconfig.get_path("stdlib") + os.sep


def digest(texts: Iterable[str]) -> str:
    joined = "\x1e".join(texts).encode(errors="surrogatepass")
    return hashlib.sha256(joined).hexdigest()[:16]


class Fingerprints:
    """Computes fingerprints. Values that several fingerprints share are described only once."""

    def __init__(self) -> None:
        #: Packages whose code was represented by name.
        self.libraries: set[str] = set()
        #: Modules of the application whose code was described.
        self.modules: set[str] = set()
        #: Ids of the values being described, outermost first. `_outermost` is the smallest index in
        #: this list that the current value refers back to; it detects cycles.
        self._open: list[int] = []
        self._outermost = 0
        #: Value and text by id. Holding the value prevents the reuse of its id.
        self._known: dict[int, tuple[Any, str]] = {}

    def text(self, value: Any) -> str:
        if type(value) is bytes and len(value) > SHORT:
            return f"bytes #{hashlib.sha256(value).hexdigest()[:16]}"
        if type(value) in _SCALARS:
            return _short(repr(value))
        if id(value) in self._known:
            return self._known[id(value)][1]
        depth = len(self._open)
        if id(value) in self._open:
            index = self._open.index(id(value))
            self._outermost = min(self._outermost, index)
            return f"^{depth - index}"
        outermost_before, self._outermost = self._outermost, depth
        self._open.append(id(value))
        try:
            description = _short(self._compound(value))
        finally:
            self._open.pop()
            closed = self._outermost >= depth
            self._outermost = min(outermost_before, self._outermost)
        if closed:  # else the text contains a reference to an enclosing value
            self._known[id(value)] = value, description
        return description

    def parts(self, fn: Callable[..., Any]) -> dict[str, str]:
        """The fingerprint of a function as named parts: messages can name the part that changed."""
        if not isinstance(fn, types.FunctionType):
            return {"function": self.text(fn)}
        code, names = fn.__code__, fn.__code__.co_varnames
        if _is_library(code.co_filename):
            parts = {"function": code.co_qualname}
        else:
            self.modules.add(fn.__module__ or "")
            parts = {"function": f"{fn.__name__} #{digest([code_text(code, self.text)])}"}
        for name, value in (fn.__kwdefaults__ or {}).items():
            parts[f"default of {name}"] = self.text(value)
        for number, value in enumerate(reversed(fn.__defaults__ or ()), 1):
            name = names[fn.__code__.co_argcount - number]
            parts[f"default of {name}"] = self.text(value)
        return parts | {name: self.text(target) for name, target in self._refers_to(fn).items()}

    def _compound(self, value: Any) -> str:
        text = self.text
        match value:
            case type():
                return self._class(value)
            case types.FunctionType():
                return self._function(value)
            case types.ModuleType():
                return self._module(value)
            case types.MethodType():
                return f"{text(value.__func__)} of {text(value.__self__)}"
            case _ if isinstance(value, _NAMED):
                owner = getattr(value, "__self__", None)
                module_level = owner is None or isinstance(owner, types.ModuleType)
                return value.__qualname__ + ("" if module_level else f" of {text(owner)}")
            case staticmethod() | classmethod():
                return f"{type(value).__name__} {text(value.__func__)}"
            case property():
                return f"property {self._all(value.fget, value.fset, value.fdel)}"
            case enum.Enum():
                return f"{type(value).__name__}.{value.name} = {text(value.value)}"
            case logging.Logger():
                return "Logger"
            case types.CodeType():
                return code_text(value, text)
        kind = type(value)
        if kind in (tuple, list):
            return f"{kind.__name__}({self._all(*value)})"
        if kind is dict:
            return "{" + ", ".join(f"{text(k)}: {text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, set | frozenset):
            return f"{text(kind)}({', '.join(sorted(map(text, value)))})"
        package = kind.__module__.partition(".")[0]
        if package in ("pyspark", "py4j") and kind.__module__ != "pyspark.sql.types":
            return self._of_spark(value)
        return self._by_reduction(value)

    def _all(self, *values: Any) -> str:
        return ", ".join(map(self.text, values))

    def _function(self, fn: types.FunctionType) -> str:
        if not _is_library(fn.__code__.co_filename):
            parts = self.parts(fn)
            return f"{fn.__name__} #{digest(f'{name}={text}' for name, text in parts.items())}"
        module = fn.__globals__.get("__name__", "")
        self.libraries.add(module.partition(".")[0])
        # A decorator of a library may wrap a function of the application.
        wrapped = [fn.__wrapped__] if hasattr(fn, "__wrapped__") else list(_closure(fn).values())
        return f"{module}.{fn.__code__.co_qualname}({self._all(*wrapped)})"

    def _class(self, cls: type) -> str:
        module = sys.modules.get(cls.__module__)
        if module is not None and _is_library(_file(module)):
            self.libraries.add(cls.__module__.partition(".")[0])
            return f"{cls.__module__}.{cls.__qualname__}"
        self.modules.add(cls.__module__)
        attributes = {name: value for name, value in vars(cls).items() if name not in _ABOUT}
        texts = [f"{name}={self.text(attributes[name])}" for name in sorted(attributes)]
        return f"{cls.__name__} #{digest([self._all(*cls.__bases__), *texts])}"

    def _module(self, module: types.ModuleType) -> str:
        file = _file(module)
        if _is_library(file):
            self.libraries.add(module.__name__.partition(".")[0])
            return f"module {module.__name__}"
        self.modules.add(module.__name__)
        return f"module #{digest([module_text(file) or ''])}"

    def _of_spark(self, value: Any) -> str:
        """JVM handles are omitted: their numbers depend on the order in which they are created."""
        name = type(value).__name__
        if name in ("Column", "DataFrame"):
            return f"{name} {value!r}"
        if name == "UserDefinedFunction":
            attributes = (value.func, str(value._returnType), value.evalType)
            return f"{name}({self._all(*attributes)})"
        return name

    def _by_reduction(self, value: Any) -> str:
        """Describe any other object by its `__reduce_ex__`; by its type alone if that fails."""
        name = self.text(type(value))
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:  # such as lru_cache
            return f"{name}({self.text(wrapped)})"
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:
            return name
        if isinstance(reduced, str):
            return f"{name} {reduced}"
        make, args, *rest = reduced
        state, items, pairs = [*rest, None, None, None][:3]
        if isinstance(state, dict):
            state = dict(sorted(state.items(), key=lambda item: str(item[0])))
        components = [make, args, state, list(items or ()), list(pairs or ())]
        return f"{name}({self._all(*components)})"

    # -- references of a function -----------------------------------------------------------------

    def _refers_to(self, fn: types.FunctionType) -> dict[str, Any]:
        """Closure and globals by name; attributes of application modules as `module.attribute`."""
        closure = _closure(fn)
        references: dict[str, Any] = {}
        for code in nested(fn.__code__):
            run = instructions(code)
            for number, op in enumerate(run):
                if op.opname == "IMPORT_NAME":
                    level, wanted = run[number - 2].argval, run[number - 1].argval
                    references |= self._imported(fn, op.argval, level or 0, wanted or ())
                elif op.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
                    namespace = closure if op.opname == "LOAD_DEREF" else fn.__globals__
                    attributes = takewhile(
                        lambda after: after.opname in _ATTRIBUTE, run[number + 1 :]
                    )
                    if op.argval in namespace and not _DUNDER.fullmatch(op.argval):
                        path = [after.argval for after in attributes]
                        references |= self._followed(op.argval, namespace[op.argval], path)
        return dict(sorted(references.items()))

    def _followed(self, name: str, value: Any, attributes: Iterable[str]) -> dict[str, Any]:
        """Resolve a module of the application to the attribute that the function uses."""
        for attribute in attributes:
            if not isinstance(value, types.ModuleType) or _is_library(_file(value)):
                break
            if not hasattr(value, attribute):
                break
            self.modules.add(value.__name__)
            name, value = f"{name}.{attribute}", getattr(value, attribute)
        return {name: value}

    def _imported(
        self, fn: types.FunctionType, name: str, level: int, wanted: Iterable[str]
    ) -> dict[str, Any]:
        """Modules that the function imports when it is called. Modules of the application are
        imported here to be described; libraries are recorded by name."""
        top = name.partition(".")[0]
        try:
            if not level and _is_library(_origin(importlib.util.find_spec(top))):
                self.libraries.add(top)
                return {}
            package = fn.__globals__.get("__package__")
            module = importlib.import_module("." * level + name, package)
        except Exception:
            return {}  # the same import error occurs when the function is called
        imported: dict[str, Any] = {}
        for attribute in wanted:
            imported |= self._followed(name, module, [attribute])
        return imported or {name: module}


def _short(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[: SHORT // 3]}… #{digest([text])}"


def _closure(fn: types.FunctionType) -> dict[str, Any]:
    values = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            values[name] = cell.cell_contents
    return values


def _file(module: types.ModuleType) -> str:
    """The file of a module; empty for a built-in module."""
    file = getattr(module, "__file__", None)
    return file or _origin(getattr(module, "__spec__", None))


def _origin(spec: ModuleSpec | None) -> str:
    if spec is None:
        return "<prompt>"
    if spec.origin in ("built-in", "frozen"):
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "<prompt>")


def _is_library(file: str) -> bool:
    path = "" if file.startswith("<frozen") else file and os.path.abspath(file)
    return (
        not path
        or path.startswith(_STDLIB)
        or (path.startswith(_OURS) and not path.startswith(_APPLICATIONS))
        or not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep))
    )
