"""Writes configurations as TOML, JSON, YAML and lists of variables, and puts one into a file that has others in it.

Values that a file sets already are replaced; whatever else it holds stays as it is. A text is returned only if it means
exactly that: it is parsed again, and compared with the file's old content and the configuration.
"""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

BEGIN, END = "# begin: reprise client", "# end: reprise client"
_MARKED = re.compile(rf"^{BEGIN}[ \t]*\n(.*?)^{END}[ \t]*(?:\n|\Z)", re.MULTILINE | re.DOTALL)
_AT_TABLES = re.compile(r"^(?=[ \t]*\[)", re.MULTILINE)
_ASSIGNED = re.compile(r"[ \t]*(?:export[ \t]+)?([A-Za-z0-9_-]+)[ \t]*=")
_SERVER_KEYS = ("provider", "base_url", "baseURL", "baseUrl", "api_base", "apiBase")  # they tell whose entry it is
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TABLE = re.compile(r"^\s*\[", re.MULTILINE)
_OPEN_QUOTE = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?[\w.-]+[ \t]*=[ \t]*(?:"(?:[^"\\\n]|\\.)*\\?|'[^'\n]*|`[^`\n]*)$""", re.MULTILINE
)
_HALF = re.compile("[\ud800-\udfff]")  # half of a character, which UTF-8 cannot hold and an escape can


class NotMerged(Exception):
    """The configuration cannot be put into the file safely. The message says why."""


class Format(Protocol):
    """A file format. `text` returns a configuration alone; `merged` returns a file's text with the configuration put
    into it, and raises NotMerged."""

    def text(self, config: Any) -> str: ...
    def merged(self, old: str, config: Any) -> str: ...


def combined(old: Any, ours: Any) -> Any:
    """Return a value of a file (`old`) with our value put into it. Objects are merged by key, and lists by the names of
    their entries; any other value is replaced. Raises NotMerged if an entry of another server has the name of one of
    ours."""
    if isinstance(old, dict) and isinstance(ours, dict):
        return {**old, **{key: combined(old[key], value) if key in old else value for key, value in ours.items()}}
    if isinstance(old, list) and isinstance(ours, list):
        replaced: list[Any] = []
        entries = []
        for entry in ours:
            same = [there for there in old if there == entry or _have_one_name(there, entry)]
            for there in same:
                _check_ours(there, entry)
            replaced += same
            entries.append(combined(same[0], entry) if same else entry)
        return [*(entry for entry in old if entry not in replaced), *entries]
    return ours


def _have_one_name(old: object, ours: object) -> bool:
    if not isinstance(old, dict) or not isinstance(ours, dict):
        return False
    name = _name(ours)
    return name is not None and _name(old) == name


def _name(entry: Mapping[str, Any]) -> object:
    """Return the name of an entry of a list; None if it has none."""
    return entry.get("id") or entry.get("name") or None


def _check_ours(old: object, ours: object) -> None:
    """Raise NotMerged if an entry with the name of ours is of another server. An entry of ours that does not say which
    server it is of stands below our provider, and so does the other."""
    if not isinstance(old, dict) or not isinstance(ours, dict):
        return
    told = [key for key in _SERVER_KEYS if key in ours]
    has_our_title = "id" in ours and "name" in ours and old.get("name") == ours["name"]
    if told and not has_our_title and not any(old.get(key) == ours[key] for key in told):
        raise NotMerged(f"it has an entry '{_name(ours)}' already, which is not of this server")


def _marked(text: str) -> str:
    return f"{BEGIN}\n{text}{END}\n"


@dataclass(frozen=True, slots=True)
class Json:
    """The format JSON. Files are refused that have comments, a key twice, or numbers that writing would change."""

    def text(self, config: Any) -> str:
        return _HALF.sub(_escaped, json.dumps(config, indent=2, ensure_ascii=False)) + "\n"

    def merged(self, old: str, config: Any) -> str:
        try:
            there = json.loads(
                old.strip() or "{}", object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite
            )
        except ValueError as error:
            raise NotMerged(f"it is not plain JSON ({error})") from None
        if not isinstance(there, dict):
            raise NotMerged("it holds no object")
        return self.text(combined(there, config))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises NotMerged if it has a key twice: all values but one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise NotMerged(f"it has the key {json.dumps(key)} twice")
    return found


def _finite(text: str) -> float:
    """Return a number of JSON. Raises NotMerged for NaN and numbers that would be written as other ones."""
    number = float(text)
    if not math.isfinite(number):
        raise NotMerged(f"it has {text[:40]}, which is no number of JSON")
    if Decimal(text) != Decimal(repr(number)):
        raise NotMerged(f"it has {text[:40]}, which would be rounded")
    return number


def _escaped(half: re.Match[str]) -> str:
    return f"\\u{ord(half[0]):04x}"


@dataclass(frozen=True, slots=True)
class Toml:
    """The format TOML. Our part stands between two marks: values before the file's own values, tables after them. A
    line of the file that sets one of our values becomes a comment. What clients and people have added between our marks
    is kept. optional: keys that only some of our configurations have."""

    optional: tuple[str, ...] = ()

    def text(self, config: Any) -> str:
        values, tables = _values_first(config)
        return f"{values}\n{tables}" if values and tables else values + tables

    def merged(self, old: str, config: Any) -> str:
        values, tables = _values_first(config)
        kept = _MARKED.sub(lambda found: self._not_ours(found[1], config, tables), old)
        try:
            before, there = tomllib.loads(old), tomllib.loads(kept)
        except tomllib.TOMLDecodeError as error:
            raise NotMerged(f"it is not TOML ({error})") from None
        begin = found.start() if (found := _TABLE.search(kept)) else len(kept)
        head, tail = kept[:begin], kept[begin:]
        for key in (key for key, value in config.items() if not _is_table(value)):
            head = re.sub(rf"^([ \t]*{re.escape(key)}[ \t]*=)", r"# \1", head, flags=re.MULTILINE)
        text = (_marked(values) if values else "") + head + tail
        text += ("" if text.endswith("\n") else "\n") + (_marked(tables) if tables else "")
        try:
            after = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            after = None
        if after is None or after != combined(there, config):
            raise NotMerged("it has some of these tables already")
        remaining = {*_paths(after)}
        for path in _paths(before):
            if path not in remaining and path[-1] not in self.optional:
                name = ".".join(map(str, path))
                raise NotMerged(f"it has {name} between '{BEGIN}' and '{END}', which is not ours: move it out")
        return text

    def _not_ours(self, marked: str, config: Mapping[str, Any], tables: str) -> str:
        """Return the values, tables and comments between our marks that are not ours."""
        values, *others = _AT_TABLES.split(marked)
        ours = {line for line in tables.splitlines() if line.startswith("[")}
        kept = [
            line
            for line in values.splitlines(keepends=True)
            if _is_comment(line)
            or ((found := _ASSIGNED.match(line)) and found[1] not in config and found[1] not in self.optional)
        ]
        for table in others:
            first, *_ = lines = table.splitlines(keepends=True)
            kept += filter(_is_comment, lines) if first.strip() in ours else lines
        return "".join(line for line in kept if not _begins(line))


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _begins(line: str) -> bool:
    """Return whether a line begins a part of ours; within another one it remains of a part whose end was removed."""
    return line.rstrip() == BEGIN


def _paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield where the values of a file are. Entries of a list of tables have numbers."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list) and _is_table(value):
        for number, entry in enumerate(value):
            yield from _paths(entry, (*path, number))
    else:
        yield path


def _values_first(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return a configuration's values and its tables as TOML."""
    values = "".join(f"{_key(key)} = {_scalar(value)}\n" for key, value in config.items() if not _is_table(value))
    return values, "\n".join(_tables(config, ""))


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _tables(config: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in config.items():
        name = f"{path}{_key(key)}"
        if isinstance(value, dict):
            own = {name: inner for name, inner in value.items() if not _is_table(inner)}
            if own:
                yield f"[{name}]\n" + _values_first(own)[0]
            yield from _tables(value, f"{name}.")
        elif _is_table(value):
            yield from (f"[[{name}]]\n" + _values_first(entry)[0] for entry in value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _scalar(key)


def _scalar(value: Any) -> str:
    """Return a value that JSON, TOML and YAML write in the same way: a text, a number, a boolean or a list of them."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Yaml:
    """The format YAML. A file with any other content is refused, because it could not be written again without losing
    its comments."""

    def text(self, config: Any) -> str:
        return "".join(f"{line}\n" for line in _yaml_lines(config))

    def merged(self, old: str, config: Any) -> str:
        if _MARKED.sub("", old).strip():
            raise NotMerged("it is YAML with other lines in it")
        text = self.text(config)
        there = "".join(found[1] for found in _MARKED.finditer(old))
        if others := _yaml_keys(there) - _yaml_keys(text):
            raise NotMerged(
                f"it has lines between '{BEGIN}' and '{END}' that are not ours: {next(iter(others)).strip()}"
            )
        return _marked(text)


def _yaml_keys(text: str) -> Counter[str]:
    """Return the lines of a text up to their values, which may change."""
    return Counter(line.partition(":")[0] for line in text.splitlines() if line.strip())


def _yaml_lines(value: Mapping[str, Any]) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield f"{key}:"
            yield from (f"  {line}" for line in _yaml_lines(inner))
        elif _is_table(inner):
            yield f"{key}:"
            for entry in inner:
                first, *rest = _yaml_lines(entry)
                yield f"  - {first}"
                yield from (f"    {line}" for line in rest)
        else:
            yield f"{key}: {_scalar(inner)}"


@dataclass(frozen=True, slots=True)
class Variables:
    """The format of .env files, lines of NAME="VALUE". A line of the file that sets one of our names becomes a comment.
    A file with a value of several lines is refused, because one of these lines may look like a variable."""

    def text(self, config: Any) -> str:
        return "".join(f"{name}={_scalar(value)}\n" for name, value in config.items())

    def merged(self, old: str, config: Any) -> str:
        if found := _OPEN_QUOTE.search(old):
            raise NotMerged(f"{found[0].partition('=')[0].strip()} has a value of several lines")
        kept = _MARKED.sub(lambda found: _other_variables(found[1], config), old)
        for name in config:
            ours = rf"^([ \t]*(?:export[ \t]+)?{re.escape(name)}[ \t]*=)"
            kept = re.sub(ours, r"# \1", kept, flags=re.MULTILINE)
        return kept + ("" if not kept or kept.endswith("\n") else "\n") + _marked(self.text(config))


def _other_variables(marked: str, config: Mapping[str, Any]) -> str:
    """Return the lines between our marks that are not ours."""
    lines = marked.splitlines(keepends=True)
    return "".join(line for line in lines if not (found := _ASSIGNED.match(line)) or found[1] not in config)


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a shell or a program. They belong into no file, so that every file with content is refused."""

    def text(self, config: Any) -> str:
        return str(config)

    def merged(self, old: str, config: Any) -> str:
        if old.strip():
            raise NotMerged("it is not empty")
        return str(config)
