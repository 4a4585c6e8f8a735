"""Finds for settings that cannot be used which setting was meant, and what values are allowed."""

import difflib
from collections.abc import Sequence
from types import UnionType
from typing import Union, get_args, get_origin

from pydantic.fields import FieldInfo

MIN_LIKENESS = 0.75  # below that a name is more likely another thing than a slip of the finger
MAX_HINTS = 3
SHORT_NAMES = {"model": "model.source"}  # options of commands that are no key of a section
# What pydantic calls problems of numbers.
NUMBER_PROBLEMS = ("greater_than", "less_than", "int_", "float_", "finite_number")


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return the known names `section.key` that an unknown name may stand for, the likeliest first; none if none is
    similar. Section and key are compared separately: in a long section every name would be like every other."""
    name = SHORT_NAMES.get(name, name)
    section, _, key = name.lower().rpartition(".")
    if not section and name.partition("_")[0] in {full.partition(".")[0] for full in known}:
        section, _, key = name.partition("_")  # as in REPRISE_CACHE_MODE
    likeness = {}
    for full in known:
        its_section, _, its_key = full.partition(".")
        alike = _alike(key, its_key)
        likeness[full] = min(alike, _alike(section, its_section)) if section else alike
    best = max(likeness.values())
    return [full for full in known if likeness[full] == best >= MIN_LIKENESS][:MAX_HINTS]


def describe(field: FieldInfo, kind: str, given: object) -> str:
    """Return a sentence about which values a setting allows; empty if pydantic's own message says it. kind: pydantic's
    name of the error, such as "greater_than". given: the value that was refused."""
    if given == "":
        default = "" if field.default is None else f" for the default, {str(field.default).lower()}"
        return f"is empty; leave it out{default}"
    if kind == "string_pattern_mismatch":
        return f"must be {field.description}"
    if not kind.startswith((*NUMBER_PROBLEMS, "bool")):
        return ""
    return f"must be {_allowed(field)}, not {str(given)[:40]}"


def _alike(given: str, known: str) -> float:
    """Return how alike two names are, from 0 to 1. The beginning of a name counts at least as much as the whole name
    with a typing error."""
    begun = MIN_LIKENESS if len(given) >= 3 and known.startswith(given) else 0.0
    return max(begun, difflib.SequenceMatcher(None, given, known).ratio())


def _allowed(field: FieldInfo) -> str:
    """Return what values a field allows, such as: a number greater than 0 and at most 3600."""
    if field.annotation is bool:
        return "true or false"
    metadata, others = field.metadata, ""
    if isinstance(field.annotation, UnionType) or get_origin(field.annotation) is Union:  # a number or a word
        number, word = get_args(field.annotation)
        metadata, others = number.__metadata__[0].metadata, f", or {get_args(word)[0]}"
    words = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
    bounds = {name: getattr(rule, name) for rule in metadata for name in words if hasattr(rule, name)}
    what = "an integer" if field.annotation is int else "a number"
    if bounds.keys() == {"ge", "le"}:
        return f"{what} between {_plain(bounds['ge'])} and {_plain(bounds['le'])}{others}"
    return f"{what} {' and '.join(f'{words[name]} {_plain(bound)}' for name, bound in bounds.items())}{others}"


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)
