"""Packs recorded answers as rows that other servers can read.

A row holds an answer and what its prompt adds to its base, an earlier answer of the same session. Its digests cover the
base's, so rows that fit together are the conversation as it was recorded, wherever they come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from reprise.app.conversations.digests import digest

MAX_TEXT_BYTES = 4 << 20
_ID_BYTES = 4


class TranscriptRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One recorded answer and its prompt in the form that other servers get; for its columns see
    `reprise.app.conversations.transcript_store`."""

    chain: bytes
    bare: bytes
    tail: bytes
    ids: bytes
    text: bytes
    ends: bytes
    prompt_chain: bytes
    base: bytes  # digest of the answer that the prompt goes on from; b"": none
    base_tokens: int
    prompt_ids: bytes
    starts: bytes
    chars: int
    text_digest: bytes

    @property
    def prompt_digest(self) -> bytes:
        prompt = (self.prompt_chain, self.base_tokens, self.prompt_ids, self.starts, self.chars)
        return digest("prompt", *prompt, self.text_digest, self.base)

    @property
    def digest(self) -> bytes:
        answer = (self.chain, self.bare, self.tail, self.ids, self.text, self.ends)
        return digest("answer", *answer, self.prompt_digest)


@dataclass(frozen=True, slots=True)
class Exported:
    """The rows of one session's recorded answers, for other servers."""

    rows: dict[bytes, bytes]  # digest of an answer -> its row
    newest: int  # id of the newest answer among them, or of the one that was asked from


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TranscriptRow).decode


def encode_row(row: TranscriptRow) -> bytes:
    return _encode(row)


def readable(rows: Mapping[bytes, bytes]) -> list[TranscriptRow]:
    """Return the rows that match their digests and whose bases (the answers that their prompts continue) are among
    them. Each comes after its base. rows: digest -> encoded row. What the rows that are left out contain is tokenized
    anew when a prompt needs it."""
    found: dict[bytes, TranscriptRow] = {}
    for mark, data in rows.items():
        try:
            row = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if _is_sound(row) and row.digest == mark:
            found[mark] = row
    after: dict[bytes, list[bytes]] = {}
    for mark, row in found.items():
        after.setdefault(row.base, []).append(mark)
    ordered: list[TranscriptRow] = []
    front = after.get(b"", [])
    while front:
        ordered += [found[mark] for mark in front]
        front = [later for mark in front for later in after.get(mark, [])]
    return ordered


def _is_sound(row: TranscriptRow) -> bool:
    return (
        len(row.text) <= MAX_TEXT_BYTES
        and 0 <= row.base_tokens < 1 << 31
        and 0 <= row.chars < 1 << 62
        and not any(len(column) % _ID_BYTES for column in (row.ids, row.ends, row.prompt_ids, row.starts))
        and (bool(row.base) or row.base_tokens == 0)
    )
