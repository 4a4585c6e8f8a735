"""Names what is unknown inside of a body's objects, so that a client learns what had no effect.

A request's type says which objects its fields hold. These are looked at field by field; what the type leaves open, such
as a JSON schema or the arguments of a call, is not. The whole costs about as much as one look at each message.
"""

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator

MAX_NAMES = 64  # most that are collected of one body
MAX_NAME_CHARS = 64  # longest name of one field; the rest of it is left out
SAID_ANYHOW = frozenset(
    {"annotations", "audio", "caller", "citations", "id", "index", "logprobs", "object", "provider_specific_fields"}
    | {"function_call", "reasoning", "reasoning_details", "refusal", "status", "thinking"}
    | {"cache_control", "eager_input_streaming", "include_obfuscation"}
)
"""Fields that come back from answers of this server and others, or were read when the history was made readable, and
marks for the caches and streams of others. They change no prompt, and every agent sends them."""


@dataclass(frozen=True, slots=True)
class Holds:
    """An annotation that tells which objects a field holds, if the field's type does not."""

    model: type[BaseModel]


@dataclass(frozen=True, slots=True)
class _Shape:
    """The fields of one kind of object, and what those hold that are objects themselves."""

    known: frozenset[str]
    inner: tuple[tuple[str, "_Kinds"], ...]


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The kinds of objects that a field may hold. by_type: by the values of their field `type`. usual: the kind of an
    object whose `type` tells nothing; None if it could be any. are_texts: whether every kind has a type and a text;
    plain texts then pass at once, since a body may have tens of thousands."""

    by_type: Mapping[str, _Shape]
    usual: _Shape | None
    are_texts: bool


def unknown_within(model: type[object], body: Mapping[str, Any]) -> list[str]:
    """Return the dotted paths of unknown fields in the objects inside of a valid body, each once and in the order sent,
    at most MAX_NAMES. Items of a list have no index in them. Null values are not reported, nor are the body's own
    fields (`Part.ignored` names them). model: the type of the request; one without fields has nothing to report."""
    found: dict[str, None] = {}
    if isinstance(model, type) and issubclass(model, BaseModel):
        for name, kinds in _shape_of(model).inner:
            _look(body.get(name), name, kinds, found)
    return list(found)


def _look(value: object, path: str, kinds: _Kinds, found: dict[str, None]) -> None:
    """Add what is unknown in an object, or in the objects of a list."""
    are_texts = kinds.are_texts
    for one in value if isinstance(value, list) else (value,):
        if are_texts and isinstance(one, dict) and len(one) == 2 and "text" in one and "type" in one:
            continue
        if len(found) >= MAX_NAMES:
            return
        if not isinstance(one, dict):
            continue
        kind = one.get("type")
        shape = kinds.by_type.get(kind, kinds.usual) if isinstance(kind, str) else kinds.usual
        if shape is None:
            continue
        if not shape.known.issuperset(one):
            for name in one:
                if name not in shape.known and one[name] is not None and len(found) < MAX_NAMES:
                    found[f"{path}.{name[:MAX_NAME_CHARS]}"] = None
        for name, inner in shape.inner:
            if name in one:
                _look(one[name], f"{path}.{name}", inner, found)


@functools.cache
def _shape_of(model: type[BaseModel]) -> _Shape:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    held = {name: _kinds_of(field.annotation, *field.metadata) for name, field in fields.items()}
    held |= {name: _kinds_of(kind) for name, kind in getattr(model, "read_as", {}).items()}
    inner = tuple((name, kinds) for name, kinds in held.items() if kinds is not None)
    read_elsewhere = getattr(model, "refused", frozenset()) | getattr(model, "converted", frozenset())
    return _Shape(SAID_ANYHOW | fields.keys() | read_elsewhere, inner)


def _kinds_of(annotation: object, *metadata: object) -> _Kinds | None:
    """Return the kinds of objects that a field of a type may hold; None if it holds none that is known. metadata: what
    is annotated to the field."""
    models = list(dict.fromkeys([*_models(annotation), *_annotated(metadata)]))
    if not models:
        return None
    by_type = {kind: _shape_of(model) for model in models for kind in _types(model)}
    usual = models[0] if len(models) == 1 else next(filter(_may_lack_type, models), None)
    are_texts = all(_shape_of(model).known >= {"type", "text"} for model in models)
    return _Kinds(by_type, None if usual is None else _shape_of(usual), are_texts)


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the types of objects in an annotation such as `list[TextBlock | ToolUseBlock] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, *metadata = get_args(annotation)
        yield from _models(kind)
        yield from _annotated(metadata)
    elif origin in (list, Union, types.UnionType):
        for part in get_args(annotation):
            yield from _models(part)


def _annotated(metadata: Iterable[object]) -> Iterator[type[BaseModel]]:
    """Yield the types of objects that a client may send where a validator makes something else of them, such as the
    parts of a content."""
    for one in metadata:
        if isinstance(one, Holds):
            yield one.model
        elif isinstance(one, BeforeValidator):
            yield from _models(one.json_schema_input_type)


def _may_lack_type(model: type[BaseModel]) -> bool:
    return "type" in model.model_fields and not model.model_fields["type"].is_required()


def _types(model: type[BaseModel]) -> Iterator[str]:
    """Yield the values that the field `type` of an object may have."""
    field = model.model_fields.get("type")
    if field is not None and get_origin(field.annotation) is Literal:
        yield from (value for value in get_args(field.annotation) if isinstance(value, str))
