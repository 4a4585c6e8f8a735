"""Measures how far the references of a JSON schema lead, because llguidance follows them by recursion: a long chain
would overflow a thread's stack, which ends the process."""

from typing import Any


def longest_chain(schema: dict[str, Any]) -> int:
    """Return how many definitions the longest chain of references leads through. One that comes back to a definition
    ends there. Works without recursion."""
    definitions: dict[str, object] = {}
    for name in ("$defs", "definitions"):
        if isinstance(given := schema.get(name), dict):
            definitions |= {f"#/{name}/{key}": value for key, value in given.items()}
    leads_to = {place: _references(value) & definitions.keys() for place, value in definitions.items()}
    lengths: dict[str, int] = {}
    for place in definitions:
        if place in lengths:
            continue
        lengths[place] = 1
        path = [(place, iter(leads_to[place]))]
        while path:
            here, others = path[-1]
            if (other := next(others, None)) is None:
                path.pop()
                if path:
                    above = path[-1][0]
                    lengths[above] = max(lengths[above], lengths[here] + 1)
            elif other in lengths:  # measured, or on the path
                lengths[here] = max(lengths[here], lengths[other] + 1)
            else:
                lengths[other] = 1
                path.append((other, iter(leads_to[other])))
    return max(lengths.values(), default=0)


def _references(schema: object) -> set[str]:
    """Return the places that a schema refers to, wherever in it."""
    found: set[str] = set()
    left = [schema]
    while left:
        match left.pop():
            case dict(fields):
                if isinstance(place := fields.get("$ref"), str):
                    found.add(place)
                left += fields.values()
            case list(items):
                left += items
    return found
