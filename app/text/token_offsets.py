"""Finds where in an answer's text its tokens begin."""

REPLACEMENT = "\ufffd".encode()  # stands in a text for bytes that are no character


class TokenOffsets:
    """A finder of the places of tokens in one text, which may come piece by piece. Tokens without text, such as special
    ones, get the place of the next token; a token that begins within a character gets that character's place."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._at = 0  # bytes of the text that the tokens so far have written
        self._chars = 0  # characters that begin in these
        self._waiting: list[bytes] = []  # tokens whose text may still come

    def next(self, text: str, tokens: list[bytes]) -> list[int]:
        """Return the offsets, in characters, of the next tokens. text: the next piece of the text; a token's text may
        come in a later piece than the token. tokens: their bytes."""
        self._text += text.encode("utf-8", "surrogatepass")
        waiting, self._waiting = self._waiting, []
        for token in waiting:
            self._take(token)
        return [self._take(token) for token in tokens]

    def _take(self, token: bytes) -> int:
        offset = self._chars - self._is_within_character()
        if self._waiting:
            self._waiting.append(token)
        elif self._text.startswith(token, self._at):
            self._advance(len(token))
        elif self._at == 0 and token[:1] == b" " and self._text.startswith(token[1:]):
            self._advance(len(token) - 1)  # tokenizers drop a space that they have put before a text
        elif token.startswith(self._text[self._at :]):
            self._waiting.append(token)
        elif self._text.startswith(REPLACEMENT, self._at) and not _is_text(token):
            self._advance(len(REPLACEMENT))
        return offset

    def _is_within_character(self) -> bool:
        return self._at < len(self._text) and _continues(self._text[self._at])

    def _advance(self, size: int) -> None:
        end = self._at + size
        self._chars += sum(not _continues(byte) for byte in self._text[self._at : end])
        self._at = end


def _continues(byte: int) -> bool:
    """Return whether a byte of UTF-8 is not the first one of its character."""
    return byte & 0xC0 == 0x80


def _is_text(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True
