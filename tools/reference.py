"""Write the tables of docs/api.md, docs/settings.md and docs/models.md from the code: `python -m tools.reference`.

A page holds its tables between two comments, `<!-- generated: NAME ARGUMENT -->` and `<!-- end -->`; all else there is
written by hand. tests/test_docs.py fails when a table is not what the code says.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from reprise.app.api.openapi import describe
from reprise.app.settings.help import SECTIONS, choices, default
from reprise.app.settings.sources import known_settings
from reprise.engine.model.known_types import KNOWN_TYPES, Service

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (DOCS / "api.md", DOCS / "settings.md", DOCS / "models.md")
BLOCK = re.compile(r"(<!-- generated: ([a-z]+) ?([\w ]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
PREFIX = "#/components/schemas/"
MAX_BOUND = 1e9  # a larger bound tells nobody anything

Schema = dict[str, Any]


def with_tables(page: str) -> str:
    """The page with its tables written anew."""
    document = describe("")
    tables: dict[str, Callable[[str], str]] = {
        "operations": lambda _: operations(document["paths"]),
        "fields": lambda name: fields(name, document["components"]["schemas"]),
        "settings": lambda _: settings(),
        "types": lambda _: types(),
    }
    return BLOCK.sub(lambda found: f"{found[1]}\n{tables[found[2]](found[3])}\n\n{found[4]}", page)


def types() -> str:
    """List the known types of models: first those that are served, then the others by why they are not."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, known in KNOWN_TYPES.items():
        if known.service is Service.REFUSED:
            row = ("refused", f"{known.reason}.", known.instead)
        elif known.service is Service.NOT_TRIED:
            row = ("not tried", "no small model of it could be made", "")
        else:
            moves = "" if known.is_movable else "; a cut computes the history again"
            how = "yes" if known.service is Service.PLAIN else "yes, as the language model in it"
            row = ("served", f"{how}{moves}", "")
        rows.setdefault(row, []).append(f"`{name}`")
    lines = [(served, " ".join(filter(None, said)), ", ".join(names)) for (served, *said), names in rows.items()]
    return _table(("", "how, or why not", "`model_type`"), lines)


def operations(paths: dict[str, dict[str, Any]]) -> str:
    """List every endpoint. A path that is also served without its /v1 is listed once."""
    lines = []
    for path, methods in paths.items():
        short = path.removeprefix("/v1")
        if f"/v1{path}" in paths:
            continue
        also = f" (also `{short}`)" if short != path and short in paths else ""
        for method, said in methods.items():
            text = ". ".join(filter(None, (said["summary"], said.get("description", "").rstrip("."))))
            lines.append(f"- `{method.upper()} {path}`{also}: {text}.")
    return "\n".join(lines)


def fields(argument: str, schemas: dict[str, Schema]) -> str:
    """Describe one object: a table of the fields that have a meaning of ours, then the others in a list by their type.
    `NAME beside BASE` names what NAME lacks of BASE, and leaves out what both have. Keeps the class's order."""
    name, _, base = argument.partition(" beside ")
    properties: dict[str, Schema] = schemas[name]["properties"]
    of_base: dict[str, Schema] = schemas[base]["properties"] if base else {}
    required = set(schemas[name].get("required", []))
    all_there = required == properties.keys()
    rows: list[tuple[str, ...]] = []
    by_type: dict[str, list[str]] = {}
    for field, schema in properties.items():
        kind, bounds, meaning = facts = _facts(schema, schemas)
        if field in of_base and _facts(of_base[field], schemas) == facts:
            continue
        if field in required and not all_there:
            bounds = f"required, {bounds}" if bounds else "required"
        aside = f" ({bounds})" if bounds else ""
        if meaning:
            rows.append((f"`{field}`", kind, meaning + aside))
        else:
            by_type.setdefault(kind, []).append(f"`{field}`{aside}")
    head = ("field, always there" if all_there else "field", "type", "meaning")
    others = "\n".join(f"- {kind}: {', '.join(names)}" for kind, names in by_type.items())
    lacking = ", ".join(f"`{field}`" for field in of_base if field not in properties)
    shared = f"The fields of `{base}`, but not {lacking}. Besides:" if base else ""
    return "\n\n".join(filter(None, (shared, _table(head, rows) if rows else "", others)))


def _facts(schema: Schema, schemas: dict[str, Schema]) -> tuple[str, str, str]:
    """Return a field's type, its bounds and its meaning; the last two may be empty."""
    return _kind(schema, schemas), _bounds(schema), schema.get("description", "")


def _kind(schema: Schema, schemas: dict[str, Schema]) -> str:
    """The type in a few words: `string`, `list of integer`. Does not say that a field may be null: nearly all may."""
    if "$ref" in schema:
        named = schema["$ref"].removeprefix(PREFIX)
        return "object" if "properties" in schemas[named] else _kind(schemas[named], schemas)
    if "const" in schema:
        return f"only `{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{word}`" for word in schema["enum"])
    if parts := schema.get("anyOf") or schema.get("oneOf"):
        kinds = [_kind(part, schemas) for part in parts if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}), schemas)}"
    return str(schema.get("type", "anything"))


def _bounds(schema: Schema) -> str:
    """`0 to 2`, `at least 1`, `default false`; empty where nothing is said."""
    parts = [schema, *schema.get("anyOf", ())]
    found = {name: part[name] for part in reversed(parts) for name in ("minimum", "maximum") if name in part}
    low, high = found.get("minimum"), found.get("maximum")
    if low is not None and abs(low) >= MAX_BOUND:
        low = None
    if high is not None and abs(high) >= MAX_BOUND:
        high = None
    said = ""
    if low is not None and high is not None:
        said = f"{low:g} to {high:g}"
    elif low is not None:
        said = f"at least {low:g}"
    elif high is not None:
        said = f"at most {high:g}"
    if (value := schema.get("default")) is not None:
        said += f"{', ' if said else ''}default {str(value).lower()}"
    return said


def settings() -> str:
    """A heading and a table for every section."""
    parts = []
    for section, members in groupby(known_settings(), key=lambda pair: pair[0].split(".")[0]):
        rows = [(f"`{name}`", _default(field), _setting_meaning(field)) for name, field in members]
        parts.append(f"## {section}: {SECTIONS[section]}\n\n" + _table(("setting", "default", "meaning"), rows))
    return "\n\n".join(parts)


def _default(field: FieldInfo) -> str:
    value = default(field)
    return f"`{value}`" if value else ""


def _setting_meaning(field: FieldInfo) -> str:
    words = choices(field) if field.annotation is not bool else ()
    allowed = " (" + ", ".join(f"`{word}`" for word in words) + ")" if words else ""
    return f"{field.description}{allowed}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)]
    lines = [f"| {line} |" for line in cells]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def main() -> None:
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"written: {page}")


if __name__ == "__main__":
    main()
