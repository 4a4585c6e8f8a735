"""Reads the configuration of a GGUF file's model, without its weights."""

from pathlib import Path
from typing import Any

from reprise.engine.gguf import llama
from reprise.engine.gguf.convert import is_ours
from reprise.engine.gguf.foreign import refuse_what_would_be_lost
from reprise.engine.gguf.reader import GgufFile, GgufRefused


def config_of(path: Path) -> Any:
    """Return transformers' configuration of a file's model. Raises GgufRefused."""
    from transformers import AutoConfig

    file = GgufFile(path)
    try:
        if is_ours(file):
            fields = llama.read_shape(file).config(llama.dtype_of(file))
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        refuse_what_would_be_lost(file, file.get("general.architecture", str, ""))
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except GgufRefused:
        raise
    except Exception as error:
        raise GgufRefused(f"{path}: transformers does not read its configuration: {error}"[:1000]) from error
