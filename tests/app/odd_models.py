"""Variants of the bundled model, whose chat template or vocabulary has a property that other models have."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reprise.model.directories import BUNDLED

FIRST, SECOND = 4094, 4095  # ids of the bundled vocabulary that become special tokens
SAID = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + SAID + "{% endfor %}" + OPENS
# Opens a thought at the end of the prompt unless it is told not to, as Qwen 3.5 does.
THINK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n<think>\n{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
# Writes calls as Qwen3-Coder's does, which wants their arguments as an object.
CODER = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n"
    "</function><|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + OPENS
)
# Wants users and assistants by turns, as Gemma's and Mistral's do.
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + SAID + "{% endfor %}" + OPENS
)
# Reads content as a list of parts, as Llama-Guard's does.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}" + OPENS
)
# Writes calls between tags, as Hermes does.
TAGS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}" + OPENS
)


def write_odd(kind: str, directory: Path) -> Path:
    """Write a variant of the bundled model: `think`, `coder`, `alternate`, `parts`, `toolspecial`, `thinkspecial`,
    `eos_of_tokenizer`, `eos_of_template`."""
    directory.mkdir(parents=True)
    for path in BUNDLED.iterdir():
        if path.suffix == ".safetensors":
            (directory / path.name).symlink_to(path)
        elif path.is_file():
            shutil.copy(path, directory / path.name)
    _CHANGES[kind](directory)
    return directory


def _with_template(template: str, *tokens: str) -> Callable[[Path], None]:
    """Return what writes a template, and gives special tokens the ids FIRST and SECOND."""

    def write(directory: Path) -> None:
        _change(directory / "tokenizer_config.json", chat_template=template)
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        for token_id, text in zip((FIRST, SECOND), tokens, strict=bool(tokens)):
            _replace_token(tokenizer, token_id, text)
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))

    return write


def _replace_token(tokenizer: dict[str, Any], token_id: int, text: str) -> None:
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    old = next(token for token, known in vocab.items() if known == token_id)
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    tokenizer["model"]["merges"] = [
        merge for merge, pair in zip(merges, pairs, strict=True) if old not in pair and "".join(pair) != old
    ]
    del vocab[old]
    vocab[text] = token_id
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": token_id, "content": text, "special": True, **flags})


def _ends_elsewhere(eos: str) -> Callable[[Path], None]:
    """Return what names the end of a document alone where the end of a text is looked for. eos: the tokenizer's."""

    def write(directory: Path) -> None:
        _change(directory / "generation_config.json", eos_token_id=0)
        _change(directory / "config.json", eos_token_id=0)
        _change(directory / "tokenizer_config.json", eos_token=eos)

    return write


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


_CHANGES: dict[str, Callable[[Path], None]] = {
    "think": _with_template(THINK),
    "coder": _with_template(CODER),
    "alternate": _with_template(ALTERNATE),
    "parts": _with_template(PARTS),
    "toolspecial": _with_template(TAGS, "<tool_call>", "</tool_call>"),
    "thinkspecial": _with_template(THINK, "<think>", "</think>"),
    "eos_of_tokenizer": _ends_elsewhere("<|im_end|>"),
    "eos_of_template": _ends_elsewhere("<|endoftext|>"),
}
