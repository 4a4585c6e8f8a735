"""Writes configurations as TOML, JSON, YAML and lists of variables, and puts one into a file that has others in it.

Values that a file sets already are replaced; whatever else it holds stays as it is. A text is returned only if it means
exactly that: it is parsed again, and compared with the file's old content and the configuration.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

BEGIN, END = "# begin: reprise client", "# end: reprise client"
_MARKED = re.compile(rf"^{BEGIN}\n.*?^{END}\n", re.MULTILINE | re.DOTALL)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TABLE = re.compile(r"^\s*\[", re.MULTILINE)


class NotMerged(Exception):
    """A file into which a configuration cannot be put safely. The message says why."""


class Format(Protocol):
    """A kind of file. `text` writes a configuration alone, `merged` puts one into a file's text. `merged` raises
    NotMerged."""

    def text(self, config: Any) -> str: ...
    def merged(self, old: str, config: Any) -> str: ...


def combined(old: Any, ours: Any) -> Any:
    """Return a value of a file after ours is put into it. Objects are combined, lists by the names of their entries."""
    if isinstance(old, dict) and isinstance(ours, dict):
        return {**old, **{key: combined(old[key], value) if key in old else value for key, value in ours.items()}}
    if isinstance(old, list) and isinstance(ours, list):
        names = [_name(entry) for entry in ours]
        return [*(entry for entry in old if entry not in ours and _name(entry) not in names), *ours]
    return ours


def _name(entry: object) -> object:
    """Return the name of an entry of a list; an entry without one is named by itself."""
    return entry.get("id") or entry.get("name") if isinstance(entry, dict) else entry


def _marked(text: str) -> str:
    return f"{BEGIN}\n{text}{END}\n"


@dataclass(frozen=True, slots=True)
class Json:
    """Comments are refused, since they would be lost."""

    def text(self, config: Any) -> str:
        return json.dumps(config, indent=2, ensure_ascii=False) + "\n"

    def merged(self, old: str, config: Any) -> str:
        try:
            there = json.loads(old or "{}")
        except ValueError as error:
            raise NotMerged(f"it is not plain JSON ({error})") from None
        if not isinstance(there, dict):
            raise NotMerged("it holds no object")
        return self.text(combined(there, config))


@dataclass(frozen=True, slots=True)
class Toml:
    """Ours stands between marks: values before the file's own, tables after them. A line of the file that sets one of
    our values becomes a comment."""

    def text(self, config: Any) -> str:
        values, tables = _values_first(config)
        return f"{values}\n{tables}" if values and tables else values + tables

    def merged(self, old: str, config: Any) -> str:
        values, tables = _values_first(config)
        kept = _MARKED.sub("", old)
        try:
            there = tomllib.loads(kept)
        except tomllib.TOMLDecodeError as error:
            raise NotMerged(f"it is not TOML ({error})") from None
        begin = found.start() if (found := _TABLE.search(kept)) else len(kept)
        head, tail = kept[:begin], kept[begin:]
        for key in (key for key, value in config.items() if not _is_table(value)):
            head = re.sub(rf"^(\s*{re.escape(key)}\s*=)", r"# \1", head, flags=re.MULTILINE)
        text = (_marked(values) if values else "") + head + tail
        text += ("" if text.endswith("\n") else "\n") + (_marked(tables) if tables else "")
        try:
            is_right = tomllib.loads(text) == combined(there, config)
        except tomllib.TOMLDecodeError:
            is_right = False
        if not is_right:
            raise NotMerged("it has some of these tables already")
        return text


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
    """A file with anything else in it is refused: it could not be written again without losing its comments."""

    def text(self, config: Any) -> str:
        return "".join(f"{line}\n" for line in _yaml_lines(config))

    def merged(self, old: str, config: Any) -> str:
        if _MARKED.sub("", old).strip():
            raise NotMerged("it is YAML with other lines in it")
        return _marked(self.text(config))


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
    """NAME="VALUE" in lines, as programs read them from a file called .env. A line of the file that sets one of our
    names becomes a comment."""

    def text(self, config: Any) -> str:
        return "".join(f"{name}={_scalar(value)}\n" for name, value in config.items())

    def merged(self, old: str, config: Any) -> str:
        kept = _MARKED.sub("", old)
        for name in config:
            kept = re.sub(rf"^(\s*(?:export\s+)?{re.escape(name)}\s*=)", r"# \1", kept, flags=re.MULTILINE)
        return kept + ("" if not kept or kept.endswith("\n") else "\n") + _marked(self.text(config))


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a shell or a program. They belong to no file, so that one with anything in it is refused."""

    def text(self, config: Any) -> str:
        return str(config)

    def merged(self, old: str, config: Any) -> str:
        if old.strip():
            raise NotMerged("it is not empty")
        return str(config)
