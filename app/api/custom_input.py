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
        self._arguments = ""
        self._at = -1  # how far the arguments are decoded; -1 before the input begins

    def push(self, arguments: str) -> str:
        """Return the text that more of the arguments add to the input."""
        self._arguments += arguments
        if self._at < 0:
            if (opening := _OPENING.match(self._arguments)) is None:
                return ""
            self._at = opening.end()
        found = _COMPLETE.match(self._arguments, self._at)
        assert found is not None
        text = found[0]
        if (half := _HIGH_SURROGATE.search(text)) is not None:  # the other half of the character is yet to come
            text = text[: half.start()]
        self._at += len(text)
        return _decoded(text)

    def flush(self) -> str:
        """Return what is left at the end of the call: all of it if the arguments were not those of a custom tool."""
        if self._at >= 0 or not self._arguments:
            return ""
        try:
            value = json.loads(self._arguments)
        except ValueError:
            return self._arguments
        given = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
        return given if isinstance(given, str) else self._arguments


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
