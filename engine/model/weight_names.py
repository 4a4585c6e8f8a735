"""Translates the names that weights have in a checkpoint to those that they have in transformers' modules.

Checkpoints of wrappers keep the names of earlier versions of transformers; `from_pretrained` translates them by the
same tables.
"""

from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from reprise.engine.model.text_of_wrapper import TextModel, on_meta


class WeightNames:
    """The names of a text model's weights. Of a plain language model's checkpoint, they stay as they are."""

    def __init__(self, text: TextModel) -> None:
        self._is_plain = not text.towers
        if self._is_plain:
            return
        model = on_meta(text)
        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._prefix: str = model.base_model_prefix
        self._known: dict[str, Any] = model.state_dict()

    def of_module(self, name: str) -> str | None:
        """Return the name that a checkpoint's weight has in the module; None if the text model has no such weight, as
        it has none of towers. The name of a weight that has to be converted besides is returned as it is."""
        if self._is_plain:
            return name
        renamed, converted_by = rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)
        if renamed not in self._known:
            return None
        return renamed if converted_by is None else name
