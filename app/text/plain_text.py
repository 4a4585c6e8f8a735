"""Text and JSON that can be sent to a client. What a model writes may decode to lone surrogates, and to numbers that
JSON does not have."""

import json
from typing import Any


def plain_text(text: str) -> str:
    """Return text that can be encoded as UTF-8: surrogates that form a pair become their character, and others
    U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def json_text(value: object) -> str:
    """Return the JSON of a value, as text that can be sent. A number that JSON does not have becomes a string."""
    try:
        return plain_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError:
        finite = json.loads(json.dumps(value), parse_constant=str)
        return plain_text(json.dumps(finite, ensure_ascii=False))


def read_json(text: str) -> Any:
    """Decode JSON leniently. A number that is too large, NaN or Infinity becomes a string with its text, and strings
    may contain line ends. Raises ValueError or RecursionError."""
    return json.loads(text, strict=False, parse_float=_number, parse_constant=str)


def _number(text: str) -> float | str:
    number = float(text)
    return text if number in (float("inf"), float("-inf")) else number
