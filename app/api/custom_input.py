"""Decodes the input of a custom tool's call while its arguments are written. The model calls a function whose one
argument is the input, so its text is a JSON string inside an object."""

import json
import re

from reprise.app.schemas.tools import CUSTOM_ARGUMENT

_OPENING = re.compile(r'\s*\{\s*"' + CUSTOM_ARGUMENT + r'"\s*:\s*"')
_HIGH, _LOW = r"u[dD][89abAB][0-9A-Fa-f]{2}", r"u[dD][c-fC-F][0-9A-Fa-f]{2}"  # halves of one character
_BEGUN_LOW = r"\\(?:u(?:[dD](?:[c-fC-F][0-9A-Fa-f]?)?)?)?"
_TOKEN = re.compile(
    r'(?P<plain>[^"\\]+)|(?P<end>")'
    rf"|(?P<begun>\\(?:u[0-9A-Fa-f]{{0,3}}|{_HIGH}(?:{_BEGUN_LOW})?)?\Z)"  # goes on with the next piece
    rf'|(?P<escape>\\(?:{_HIGH}\\{_LOW}|u[0-9A-Fa-f]{{4}}|["\\/bfnrt]))'
    r"|(?P<literal>\\)"  # begins no escape that JSON knows, as in a path or an expression
)


class CustomInput:
    """A decoder of the input of a custom tool's call. A custom tool takes one text, which the model writes as the
    argument `input` of JSON arguments. These arrive in pieces cut anywhere; the returned texts, joined, are the same
    wherever the cuts are."""

    def __init__(self) -> None:
        self._rest = ""  # what is not decoded yet
        self._has_begun = False
        self._has_ended = False

    def push(self, arguments: str) -> str:
        """Take the next piece of the call's arguments. Returns the part of the input that it completes."""
        if self._has_ended:
            return ""
        self._rest += arguments
        if not self._has_begun:
            if (opening := _OPENING.match(self._rest)) is None:
                return ""
            self._has_begun = True
            self._rest = self._rest[opening.end() :]
        return self._take()

    def flush(self) -> str:
        """Return the rest of the input at the end of the call. If the arguments never had the form of a custom tool's,
        they are returned as they are. An incomplete escape at the end of a cut answer is left out."""
        if self._has_begun or not self._rest:
            return ""
        try:
            value = json.loads(self._rest)
        except (ValueError, RecursionError):
            return self._rest
        given = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
        return _sendable(given) if isinstance(given, str) else self._rest

    def _take(self) -> str:
        """Decode the string as far as it is clear."""
        texts: list[str] = []
        rest, place = self._rest, 0
        while (token := _TOKEN.match(rest, place)) is not None and token.lastgroup != "begun":
            if token.lastgroup == "end":
                self._has_ended = True
                self._rest = ""
                return "".join(texts)
            texts.append(_unescaped(token[0]) if token.lastgroup == "escape" else token[0])
            place = token.end()
        self._rest = rest[place:]
        return "".join(texts)


def input_of(arguments: str) -> str:
    """Return the input of a custom tool from the complete arguments of its call."""
    decoder = CustomInput()
    return decoder.push(arguments) + decoder.flush()


def _unescaped(escape: str) -> str:
    return _sendable(json.loads(f'"{escape}"'))


def _sendable(text: str) -> str:
    """Replace halves of characters, which cannot be sent."""
    return text.encode("utf-8", "replace").decode()
