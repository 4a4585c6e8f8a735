"""Decodes the input of a custom tool's call while its arguments are written. The model calls a function whose one
argument is the input, so its text is a JSON string inside an object."""

import json
import re

from reprise.app.schemas.tools import CUSTOM_ARGUMENT

_OPENING = re.compile(r'\s*\{\s*"' + CUSTOM_ARGUMENT + r'"\s*:\s*"')
_COMPLETE = re.compile(r'(?:[^"\\]|\\(?:[^u]|u[0-9A-Fa-f]{4}))*')  # whole characters of a JSON string
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9A-Fa-f]{2}\Z")


class CustomInput:
    """A decoder of one call's arguments, which arrive in pieces cut anywhere."""

    def __init__(self) -> None:
        self._rest = ""  # what is not decoded yet
        self._has_begun = False

    def push(self, arguments: str) -> str:
        """Return the text that more of the arguments add to the input."""
        self._rest += arguments
        if not self._has_begun:
            if (opening := _OPENING.match(self._rest)) is None:
                return ""
            self._has_begun = True
            self._rest = self._rest[opening.end() :]
        found = _COMPLETE.match(self._rest)
        assert found is not None
        text = found[0]
        if (half := _HIGH_SURROGATE.search(text)) is not None:  # the other half of the character is yet to come
            text = text[: half.start()]
        self._rest = self._rest[len(text) :]
        return _decoded(text)

    def flush(self) -> str:
        """Return what is left at the end of the call: all of it if the arguments were not those of a custom tool."""
        if self._has_begun or not self._rest:
            return ""
        try:
            value = json.loads(self._rest)
        except ValueError:
            return self._rest
        given = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
        return given if isinstance(given, str) else self._rest


def input_of(arguments: str) -> str:
    """Return the input of a complete call."""
    decoder = CustomInput()
    return decoder.push(arguments) + decoder.flush()


def _decoded(text: str) -> str:
    try:
        decoded: str = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text  # an escape that JSON does not know
    return decoded.encode("utf-8", "replace").decode()  # half a character cannot be sent
