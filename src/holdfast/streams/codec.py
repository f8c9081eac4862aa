"""Encodes frozen dataclasses as plain JSON objects, and decodes and validates them.

The types of the fields are the format. A field that is missing, unknown, of another type or out of
range is refused; the error names the expected and the found value. A handler therefore only sees
values of the types it was written for.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast.errors import HoldfastError
from holdfast.frozen import dataclass

T = TypeVar("T")
#: Converts a JSON value to a field value, or raises `Unfit`.
Decode = Callable[[Any], Any]
#: Converts a field value to a JSON value; None: the field value is valid JSON as it is.
Encode = Callable[[Any], Any] | None


class Unfit(Exception):
    """A value does not have the type of its field: the field, the expected and the found value."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found
        self.at: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"field {'.'.join(self.at)!r}: " if self.at else ""
        return f"{where}expected {self.expected}, found {self.found}"

    def within(self, place: str) -> Unfit:
        self.at = (place, *self.at)
        return self


@dataclass(frozen=True, slots=True)
class Range:
    """An integer range, both ends included."""

    lowest: int
    highest: int

    def check(self, value: int) -> None:
        if not self.lowest <= value <= self.highest:
            raise Unfit(str(self), shown(value))

    def __str__(self) -> str:
        return f"an integer from {self.lowest} to {self.highest}"


@dataclass(frozen=True, slots=True)
class Inside:
    """A relative file name that does not lead out of its folder."""

    def check(self, value: str) -> None:
        if not is_inside(value):
            raise Unfit("the name of a file inside the folder", shown(value))


#: Every integer must fit a 64-bit column.
INT64 = Range(-(2**63), 2**63 - 1)
#: Epochs and other counts. The bound leaves room for increments within 64 bits.
Count = Annotated[int, Range(0, 2**62)]
FileName = Annotated[str, Inside()]


def is_inside(name: str) -> bool:
    """Whether the name is relative, normalized and stays inside its folder."""
    plain = name == posixpath.normpath(name) and "\0" not in name
    return plain and not name.startswith("/") and name.split("/")[0] not in (".", "..")


def shown(value: Any) -> str:
    """A value as text for an error message, bounded in length for any input from a peer."""
    match value:
        case dict():
            return f"an object with {len(value)} fields"
        case list():
            return f"a list of {len(value)} items"
        case None:
            return "null"
        case int() if abs(value) > INT64.highest:
            return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def encode(value: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Encode a dataclass as a JSON object, except the fields `without`."""
    body: dict[str, Any] = _codec(type(value), without)[0](value)
    return body


def decode(
    cls: type[T], body: Any, error: type[HoldfastError], what: str, *, without: tuple[str, ...] = ()
) -> T:
    """Decode a JSON object into a dataclass. Raises `error` if the object, called `what` in the
    message, does not fit. The fields `without` get their defaults."""
    try:
        value: T = _codec(cls, without)[1](body)
        return value
    except Unfit as err:
        raise error(f"{what}: {err}; run the same version on both sides") from None


def _codec(cls: Any, without: tuple[str, ...] = ()) -> tuple[Callable[[Any], Any], Decode]:
    return _compiled(cls, without)


@cache
def _compiled(cls: Any, without: tuple[str, ...]) -> tuple[Callable[[Any], Any], Decode]:
    hints = get_type_hints(cls, include_extras=True)
    parts = {f.name: _part(hints[f.name]) for f in fields(cls) if f.name not in without}
    encoders = [(name, encoder) for name, (encoder, _) in parts.items()]
    decoders = [(name, decoder) for name, (_, decoder) in parts.items()]
    names = frozenset(parts)

    def to_json(value: Any) -> dict[str, Any]:
        return {
            name: getattr(value, name) if encoder is None else encoder(getattr(value, name))
            for name, encoder in encoders
        }

    def of_json(body: Any) -> Any:
        if not isinstance(body, dict):
            raise Unfit("an object", shown(body))
        if body.keys() != names:
            listed = ", ".join(sorted(names)) or "none"
            missing, surplus = sorted(names - body.keys()), sorted(body.keys() - names)
            differences = [f"no {name!r}" for name in missing] + [shown(name) for name in surplus]
            raise Unfit(f"the fields {listed}", ", ".join(differences[:8]))
        values = {}
        for name, decoder in decoders:
            try:
                values[name] = decoder(body[name])
            except Unfit as err:
                raise err.within(name) from None
        return cls(**values)

    return to_json, of_json


def _part(hint: Any) -> tuple[Encode, Decode]:
    """Encoder and decoder of one field type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _checked(args[0], args[1:])
    if origin in (Union, UnionType):
        (one,) = [arg for arg in args if arg is not NoneType]
        return _optional(one)
    if origin is Literal:
        return None, _one_of(args)
    if origin is tuple:
        return _sequence(args[0]) if args[-1] is Ellipsis else _fixed(args)
    if origin in (dict, Mapping):
        assert args[0] is str, hint
        return (None, _object) if args[1] is Any else _mapping(args[1])
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _codec(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return None, _enum(hint)
    return None, _PLAIN[hint]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unfit("a string", shown(value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unfit("a string of valid Unicode characters", shown(value)) from None
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Unfit("an integer", shown(value))
    INT64.check(value)
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise Unfit("a finite number", shown(value))
    return float(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unfit("true or false", shown(value))
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unfit("an object", shown(value))
    return value


_PLAIN: dict[type, Decode] = {str: _text, int: _whole, float: _number, bool: _truth}


def _checked(hint: Any, checks: tuple[Any, ...]) -> tuple[Encode, Decode]:
    encoder, decoder = _part(hint)

    def of_json(value: Any) -> Any:
        decoded = decoder(value)
        for one in checks:
            one.check(decoded)
        return decoded

    return encoder, of_json


def _optional(hint: Any) -> tuple[Encode, Decode]:
    encoder, decoder = _part(hint)

    def of_json(value: Any) -> Any:
        return None if value is None else decoder(value)

    if encoder is None:
        return None, of_json
    encode_value = encoder
    return lambda value: None if value is None else encode_value(value), of_json


def _one_of(choices: tuple[Any, ...]) -> Decode:
    def of_json(value: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise Unfit(f"one of {', '.join(map(repr, choices))}", shown(value))
        return value

    return of_json


def _enum(cls: type[StrEnum]) -> Decode:
    choice = _one_of(tuple(one.value for one in cls))
    return lambda value: cls(choice(value))


def _sequence(hint: Any) -> tuple[Encode, Decode]:
    encoder, decoder = _part(hint)

    def of_json(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise Unfit("a list", shown(value))
        return tuple(_item(decoder, str(at), one) for at, one in enumerate(value))

    if encoder is None:
        return list, of_json
    encode_item = encoder
    return lambda value: [encode_item(one) for one in value], of_json


def _fixed(hints: tuple[Any, ...]) -> tuple[Encode, Decode]:
    parts = [_part(hint) for hint in hints]
    assert all(encoder is None for encoder, _ in parts), hints

    def of_json(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise Unfit(f"a list of {len(parts)} items", shown(value))
        items = zip(parts, value, strict=True)
        return tuple(_item(part[1], str(at), one) for at, (part, one) in enumerate(items))

    return list, of_json


def _mapping(hint: Any) -> tuple[Encode, Decode]:
    encoder, decoder = _part(hint)

    def of_json(value: Any) -> Any:
        body = _object(value)
        return {_text(name): _item(decoder, shown(name), one) for name, one in body.items()}

    if encoder is None:
        return dict, of_json
    encode_item = encoder
    return lambda value: {name: encode_item(one) for name, one in value.items()}, of_json


def _item(decoder: Decode, place: str, value: Any) -> Any:
    try:
        return decoder(value)
    except Unfit as err:
        raise err.within(place) from None
