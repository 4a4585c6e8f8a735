"""Finds the tokens that end an answer and that the settings of a model leave out.

A model says in generation_config.json or config.json which tokens end its texts. Some name only the end of a document
there, and the end of a turn elsewhere: as the tokenizer's `eos_token`, or in the chat template alone. An answer would
run on into invented turns.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

log = logging.getLogger(__name__)

_MAX_TEMPLATE_BYTES, _MAX_CONFIG_BYTES = 4 << 20, 64 << 20
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "<|endofturn|>", "[|endofturn|]", "<|role_end|>"),
    *("<|assistant_end|>", "<seed:eos>", "[e~[", "<|eos|>", "<|end_of_msg|>", "<eoa>", "<EOT>", "</s>"),
)
"""Texts that end a turn in the chat templates of models."""
_END, _ENDS_OF_CHANNELS = "<|end|>", "<|return|>"
"""`<|end|>` ends a turn too, but not in a vocabulary with `<|return|>`: there it ends a thought, and the answer comes
after it."""


def further_end_ids(directory: Path, *, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of tokens that end an answer besides those in the model's settings: the tokenizer's `eos_token`,
    and the tokens for the end of a turn that the chat template mentions. Files that cannot be read add none."""
    config = _json(directory / "tokenizer_config.json", _MAX_CONFIG_BYTES)
    template = _template(directory, config)
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    wanted = [eos] if isinstance(eos, str) and eos else []
    wanted += [text for text in (*_TURN_ENDS, _END) if text in template]
    if not wanted:
        return ()
    ids = _ids(directory, config, dict.fromkeys([*wanted, _ENDS_OF_CHANNELS]))
    if _ENDS_OF_CHANNELS in ids:
        ids.pop(_END, None)
    ids.pop(_ENDS_OF_CHANNELS, None)
    return tuple(dict.fromkeys(token_id for token_id in ids.values() if 0 <= token_id < vocab_size))


def _ids(directory: Path, config: dict[str, Any], texts: Iterable[str]) -> dict[str, int]:
    """Return the ids of those texts that are tokens, from the list of added tokens if it has the first of them: to read
    a whole tokenizer takes up to a second."""
    wanted = list(texts)
    listed = config.get("added_tokens_decoder")
    found: dict[str, int] = {}
    for token_id, token in listed.items() if isinstance(listed, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if content in wanted and isinstance(token_id, str) and token_id.isdecimal() and len(token_id) < 10:
            found[content] = int(token_id)
    if wanted[0] in found:
        return {text: found[text] for text in wanted if text in found}
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception on an unreadable file
        log.info("tokens that end a turn were not looked for: %s", error)
        return {}
    known = ((text, tokenizer.token_to_id(text)) for text in wanted)
    return {text: token_id for text, token_id in known if token_id is not None}


def _template(directory: Path, config: dict[str, Any]) -> str:
    """Return all sources of the chat template as one text; empty if there is none."""
    sources = [config.get("chat_template"), _json(directory / "chat_template.json", _MAX_TEMPLATE_BYTES)]
    texts = [json.dumps(source, ensure_ascii=False) for source in sources if source]
    paths = [directory / "chat_template.jinja", *(directory / "additional_chat_templates").glob("*.jinja")]
    return "\n".join([*texts, *(_text(path, _MAX_TEMPLATE_BYTES) for path in paths)])


def _json(path: Path, most_bytes: int) -> dict[str, Any]:
    try:
        value = json.loads(_text(path, most_bytes) or "null")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(path: Path, most_bytes: int) -> str:
    try:
        if path.stat().st_size > most_bytes:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
