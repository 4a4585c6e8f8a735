"""Implements the text side of a model: chat template, token ids, incremental detokenizing, stop strings.

Uses only the `tokenizers` library, so that the HTTP process needs neither torch nor transformers.
"""

import functools
import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from reprise.app.text.answer_form import AnswerForm
from reprise.app.text.detokenizer import BYTE_TOKEN, ByteDetokenizer, Detokenizer, WindowDetokenizer
from reprise.app.text.families.detect import AUTO
from reprise.app.text.probe import as_parts
from reprise.app.text.template import ChatTemplate, TemplateError

# Inserted into special tokens inside messages so that they are encoded as plain text: only the template may open and
# close turns. The character is a noncharacter, which no text for exchange contains; `encode` removes it.
SHIELD = "\ufdd0"
COUNT_CHARS = 1 << 16  # longest piece tokenized only to be counted; takes a tenth of a second
COUNT_SLACK = 256  # tokens that cutting a text in two may add; in fact only a few


class TokenizerError(Exception):
    """The directory holds no usable tokenizer. The message says what is missing."""


class PromptTooLong(Exception):
    """The text of a prompt, or of its newest message, has more tokens than `max_tokens`, which is also a field of this
    error. The actual count is not known."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(f"more than {max_tokens} tokens")
        self.max_tokens = max_tokens


class ChatTokenizer:
    """One model's tokenizer and chat template. Immutable after `load`."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        digest: bytes,
        calls: str = AUTO,
        thoughts: str = AUTO,
        media_ids: Collection[int] = (),
    ) -> None:
        """Set up. calls, thoughts: names of the families in whose form the model writes calls and thoughts; AUTO: those
        that its template shows. media_ids: tokens that stand for images and the like, which the model cannot read."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.template_digest = digest  # covers everything that decides which ids a message list becomes
        self.has_chat_template = template is not None
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        # Ask the decoder what decoding skips: a token can be special without the flag in the file.
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.content and not tokenizer.decode([token_id], skip_special_tokens=True)
        )
        self.form = AnswerForm.of(
            None if template is None else self._render_probe,
            {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()},
            self.special_ids,
            calls=calls,
            thoughts=thoughts,
        )
        self.mark_ids = frozenset(self.form.marks)
        added = tokenizer.get_added_tokens_decoder()
        # A configuration may name a token of its own default that is a word in this vocabulary.
        self.media_ids = frozenset(
            token_id for token_id in media_ids if token_id in added or tokenizer.id_to_token(token_id) is None
        )
        kinds = {part.get("type") for part in _parts(_state(tokenizer.decoder))}
        self._byte_level = kinds == {"ByteLevel"}
        self._token_bytes = functools.lru_cache(maxsize=1 << 15)(self._read_token_bytes)
        specials = [tokenizer.id_to_token(token_id) or "" for token_id in self.special_ids | self.media_ids]
        longest_first = sorted((token for token in specials if len(token) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._openings = frozenset(token[0] for token in longest_first)
        # A byte-level vocabulary drops no character unless a normalizer or a token does, so its longest token bounds
        # how much text a number of tokens can hold.
        longest = max((len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1)
        swallows = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
        self._max_token_bytes = None if tokenizer.normalizer or swallows or not self._byte_level else longest
        # sentencepiece vocabularies put a space before every text they encode, but not after a newline.
        self._adds_prefix = False
        self._newline_ids = self.encode("\n")
        self._adds_prefix = self.encode("\na") != self._newline_ids + self.encode("a")

    @classmethod
    def load(
        cls, directory: Path, *, calls: str = AUTO, thoughts: str = AUTO, media_ids: Collection[int] = ()
    ) -> "ChatTokenizer":
        """Load from tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat template files. All but
        the first are optional. calls, thoughts: names of the families in whose form the model writes calls and
        thoughts; AUTO: those that its template shows. media_ids: tokens that stand for images and the like. Raises
        TokenizerError."""
        path = directory / "tokenizer.json"
        try:
            raw = path.read_bytes()
            tokenizer = Tokenizer.from_buffer(raw)
        except FileNotFoundError:
            raise TokenizerError(
                f"{directory} has no tokenizer.json (convert the tokenizer to the fast format)"
            ) from None
        except Exception as error:  # the library raises bare Exception on an unreadable file
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        config = {
            **_read_json(directory / "special_tokens_map.json"),
            **_read_json(directory / "tokenizer_config.json"),
        }
        special_tokens = _special_tokens(config)
        _add_missing_tokens(tokenizer, config, special_tokens)
        sources = _template_sources(directory, config)
        try:
            template = ChatTemplate(sources=sources, special_tokens=special_tokens) if sources else None
        except TemplateError as error:
            raise TokenizerError(f"the chat template in {directory} cannot be compiled: {error}") from error
        digest = blake2b(digest_size=16)
        media = [json.dumps(sorted(media_ids)).encode()] if media_ids else []
        for part in (raw, json.dumps([sources, special_tokens], sort_keys=True).encode(), *media):
            digest.update(len(part).to_bytes(8, "little") + part)
        return cls(
            tokenizer=tokenizer,
            template=template,
            digest=digest.digest(),
            calls=calls,
            thoughts=thoughts,
            media_ids=media_ids,
        )

    def _render_probe(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        template_args: dict[str, Any],
        opens_answer: bool,
    ) -> str:
        assert self._template is not None
        return self._template.render(
            messages, tools=tools, template_args=template_args, add_generation_prompt=opens_answer
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_args: dict[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Render messages with the chat template. Raises TemplateError, also if the model has no template."""
        if self._template is None:
            raise TemplateError("This model has no chat template.")
        if not self._has_no_special(messages):
            messages = [self._shielded(message) for message in messages]
        return self._template.render(
            [as_parts(message) for message in messages] if self.form.takes_parts else messages,
            tools=None if tools is None else [self._shielded(tool) for tool in tools],
            template_args=template_args,
            add_generation_prompt=add_generation_prompt,
        )

    def _has_no_special(self, messages: list[dict[str, Any]]) -> bool:
        """Return True if no message contains a special token. A quick check of a whole history; False means that a
        closer look is needed."""
        try:
            text = "".join([value for message in messages for value in message.values()])
        except TypeError:  # a value is not a string
            return False
        return not any(opening in text for opening in self._openings)

    def _shielded(self, value: Any) -> Any:
        """Return a copy of a message, or of a part of one, with SHIELD after the first character of every special token
        in it. A client's text can then not act as a control token."""
        if isinstance(value, str):
            return self._special.sub(lambda match: match[0][0] + SHIELD + match[0][1:], value)
        if isinstance(value, dict):
            return {key: self._shielded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._shielded(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Encode text. The special tokens that the template wrote are recognised. Those in a client's messages stay
        plain text, because `render` has marked them. No token is added, such as one for the beginning."""
        return self._encode(text, follows=False)

    def encode_continuation(self, text: str) -> list[int]:
        """Encode text that follows other text: like `encode`, but without the space that some vocabularies put
        first."""
        return self._encode(text, follows=True)

    def problem_of_media(self, token_ids: Collection[int]) -> str | None:
        """Return why a prompt with a token for an image or the like cannot be taken; None if the prompt has no such
        token."""
        if not (found := self.media_ids.intersection(token_ids)):
            return None
        first = min(found)
        text = self._tokenizer.id_to_token(first)
        return f"token {first}{f' ({text})' if text else ''} stands for an image, a video or a sound"

    def encode_prompts(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Encode whole texts as they are. Special tokens in them are special; with `add_special_tokens`, those that the
        model expects around a text are added. Releases the GIL."""
        return [found.ids for found in self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)]

    def encode_plain(self, text: str, *, follows: bool) -> list[int]:
        """Encode text literally: special tokens in it are spelled out. `follows`: the text follows other text, as in
        `encode_continuation`."""
        return self._encode(self._shielded(text), follows=follows)

    def encode_marked(self, text: str, marks: Sequence[int], *, follows: bool) -> tuple[list[int], list[int]]:
        """Return the ids, and for each of the increasing character offsets `marks` the index of the first token that
        begins there or later. `follows`: the text follows other text."""
        places: list[int] = []
        return self._encode(text, follows=follows, marks=marks, places=places), places

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Return True only if `text` certainly has more than `max_tokens` tokens. Decides by the text's length or
        tokenizes it piece by piece, and stops soon after the limit. False is no proof: the caller of `encode` has to
        count texts of one piece (COUNT_CHARS characters), and texts a few tokens over the limit."""
        shown = text.replace(SHIELD, "")
        if self._max_token_bytes is not None and len(shown) > max_tokens * self._max_token_bytes:
            return True
        if len(text) <= COUNT_CHARS:
            return False
        count = 0
        for start in range(0, len(text), COUNT_CHARS):
            count += len(self._encode(text[start : start + COUNT_CHARS], follows=True)) - COUNT_SLACK
            if count > max_tokens:
                return True
        return False

    def _encode(
        self, text: str, *, follows: bool, marks: Sequence[int] = (), places: list[int] | None = None
    ) -> list[int]:
        pieces = text.split(SHIELD)
        bare = [self._adds_prefix and piece != "" and (follows or place > 0) for place, piece in enumerate(pieces)]
        # The batch call releases the GIL, the single call does not: tokenizing 2 MB held up all other requests for 4 s.
        texts = ["\n" + piece if b else piece for piece, b in zip(pieces, bare, strict=True)]
        ids: list[int] = []
        offset = 0  # place of the piece in the text
        for piece, b, encoding in zip(pieces, bare, self._encode_batch(texts), strict=True):
            count = len(self._newline_ids) if b else 0
            if b and encoding.ids[:count] != self._newline_ids:
                encoding, count, b = self._encode_batch([piece])[0], 0, False
            begins: list[int] | None = None
            while places is not None and len(places) < len(marks) and marks[len(places)] <= offset + len(piece):
                begins = [begin - b for begin, _ in encoding.offsets[count:]] if begins is None else begins
                places.append(len(ids) + bisect_left(begins, marks[len(places)] - offset))
            ids += encoding.ids[count:]
            offset += len(piece) + len(SHIELD)
        return ids

    def _encode_batch(self, texts: list[str]) -> list[Encoding]:
        return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's own text, with U+FFFD where it is no whole character, and its bytes. Both are empty for an
        unknown id."""
        if self._byte_level:
            raw = self._token_bytes(token_id)
            return raw.decode("utf-8", "replace"), raw
        # The first token of a text may lose its leading space, so decode it in second place.
        once = self.decode([token_id], skip_special_tokens=False)
        text = self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]
        byte = BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return text, bytes.fromhex(byte[1]) if byte else text.encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new detokenizer, for one choice."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if self._byte_level:
            return ByteDetokenizer(self._token_bytes, skipped)
        return WindowDetokenizer(self._tokenizer, skipped)

    def _read_token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # the embedding matrix may have rows without a token
            return b""
        byte_of = _byte_alphabet()
        try:
            return bytes([byte_of[char] for char in token])
        except KeyError:  # an added token outside the byte alphabet stands for itself
            return token.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Map characters to bytes as byte-level vocabularies do: printable Latin-1 as itself, the rest in order from
    U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _state(decoder: Any) -> dict[str, Any]:
    return json.loads(decoder.__getstate__()) if decoder is not None else {}


def _parts(state: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if state.get("type") == "Sequence":
        for part in state["decoders"]:
            yield from _parts(part)
    else:
        yield state


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _content(token: object) -> str | None:
    """Return the text of a token given as a string or as an object with flags."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Return the special tokens under the names that templates use: bos_token, eos_token, ...,
    additional_special_tokens."""
    extra = config.get("extra_special_tokens")
    named = {**config, **extra} if isinstance(extra, dict) else config
    found: dict[str, Any] = {
        name: content for name, token in named.items() if name.endswith("_token") and (content := _content(token))
    }
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(tokens := config.get(name), list):
            found[name] = [content for token in tokens if (content := _content(token))]
    return found


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], special_tokens: dict[str, Any]) -> None:
    """Add tokens that only the config declares, in the order of their ids, and mark special ones."""
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for token_id, flags in sorted((int(key), value) for key, value in declared.items() if key.isdecimal()):
            content = _content(flags)
            # The library assigns ids itself; a token that would get another id than in training is left out.
            if content and tokenizer.token_to_id(content) is None and token_id == tokenizer.get_vocab_size(True):
                names = ("single_word", "lstrip", "rstrip", "normalized", "special")
                tokenizer.add_tokens([AddedToken(content, **{n: bool(flags[n]) for n in names if n in flags})])
    for value in special_tokens.values():
        for content in [value] if isinstance(value, str) else value:
            if tokenizer.token_to_id(content) is not None:
                tokenizer.add_special_tokens([content])


def _template_sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Map template names to texts. Files override the config, which may list several templates."""
    given = config.get("chat_template")
    if isinstance(given, list):
        sources = {str(entry["name"]): str(entry["template"]) for entry in given if isinstance(entry, dict)}
    else:
        sources = {"default": given} if isinstance(given, str) else {}
    paths = {"default": directory / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    for name, path in paths.items():
        try:
            sources[name] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error
    return sources
