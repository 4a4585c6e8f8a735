"""Chooses the codec that compresses KV where it is stored, outside HBM."""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

from reprise.cache.blocks.keys import typed_fields
from reprise.engine.codec.activation import find_projection
from reprise.engine.codec.chosen import ChosenCodec
from reprise.engine.codec.quality import Subject
from reprise.engine.codec.transform import make_transform
from reprise.engine.config import CacheConfig, SelectorConfig

CODECS: Mapping[str, Callable[[CacheConfig, Subject, Path, bytes], ChosenCodec]] = {"transform": make_transform}
"""Maps a value of `cache.codec` to the function that makes the codec of a model: (settings, the model, path of its
`tokenizer.json`, its fingerprint). That raises ModelRefused. `activation` is missing because it is no codec: it stores
other data instead of KV."""


def choose_codec(config: CacheConfig, subject: Subject, *, tokenizer: Path, fingerprint: bytes) -> ChosenCodec:
    """Return the codec that compresses KV below HBM, as the setting `cache.codec` asks. The ChosenCodec is empty for
    `raw`, and where `cache.mode` is not attentionstore; for `activation` it has a projection in place of a codec.
    tokenizer: path of the model's `tokenizer.json`; fingerprint: bytes that identify the model. Raises ModelRefused if
    the codec cannot be used with the model."""
    if config.codec == "raw" or config.mode != "attentionstore":
        return ChosenCodec()
    if config.codec == "activation":
        return ChosenCodec(projection=find_projection(subject))
    return CODECS[config.codec](config, subject, tokenizer, fingerprint)


def coded_fingerprint(model: bytes, codec: str) -> bytes:
    """Return the fingerprint under which KV is stored: the model's, combined with the name of the codec unless that is
    `raw`. So a server with another codec never finds KV that this codec has compressed, nor KV that was computed after
    such KV."""
    if codec == "raw":
        return model
    return blake2b(typed_fields("reprise-codec", model, codec), digest_size=len(model)).digest()


def selected_fingerprint(model: bytes, config: SelectorConfig) -> bytes:
    """Return the fingerprint under which KV is stored: the model's, combined with the selector's settings if there is a
    selector. A selector has decode steps read parts of long contexts, which changes the KV computed after them. So a
    server with another selector, or with none, never finds that KV."""
    if config.name == "none":
        return model
    fields = typed_fields("reprise-selector", model, config.name, config.min_context, repr(config.share))
    return blake2b(fields, digest_size=len(model)).digest()
