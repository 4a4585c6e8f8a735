"""Describes the codec that a server uses, so that the engine can be composed with it."""

from dataclasses import dataclass
from pathlib import Path

from reprise.engine.codec.activation import KvProjection
from reprise.engine.codec.refusal_file import save as save_refusal
from reprise.engine.codec.text import text_digest
from reprise.engine.step.ports import Verdict
from reprise.kernels.codecs.codec import Codec, Decodes


@dataclass(frozen=True, slots=True)
class ChosenCodec:
    """The codec that a server uses, or the reason why it uses none.

    codec: None: KV below DRAM is stored as it is in DRAM, uncompressed. decodes: makes rows from the codec's segments
    (a block's stored bytes in one layer), for pages on the model's device; None: nothing is decoded. projection: makes
    KV from activations, which all tiers below HBM then store instead of KV; None: they store KV. divergence: nats per
    token as measured on this model; None: not measured. warning: text for people, if the settings asked for another
    codec. budget: nats per token to which the codec was calibrated; None: there is no codec.

    refusals: the file in which it is noted if the codec must no longer be used. is_refused: whether that file refuses
    the codec: a check in an earlier run has found that it changes answers too much, or the file cannot be read. Such a
    codec compresses and decodes nothing, but its name stays in the names of blocks, so that KV stored by earlier starts
    is still found.
    """

    codec: Codec | None = None
    decodes: Decodes | None = None
    projection: KvProjection | None = None
    divergence: float | None = None
    warning: str | None = None
    budget: float | None = None
    refusals: Path | None = None
    is_refused: bool = False

    def remember(self, verdict: Verdict) -> None:
        """Write to the file of refusals that the codec was condemned, so that later starts do not use it."""
        if self.refusals is not None and self.codec is not None:
            why = f"the shadow check found {verdict.recent:.2g} nats a token, {verdict.limit:.2g} are tolerated"
            save_refusal(self.refusals, codec=self.codec.name, made_of=text_digest(), why=why)

    @property
    def name(self) -> str:
        if self.projection is not None:
            return self.projection.name
        return "raw" if self.codec is None else self.codec.name
