"""Describes the codec that a server uses, for the composition of the engine."""

from dataclasses import dataclass
from pathlib import Path

from reprise.engine.codec.activation import KvProjection
from reprise.engine.codec.refusal_file import save as save_refusal
from reprise.engine.codec.text import text_digest
from reprise.engine.step.ports import Verdict
from reprise.kernels.codecs.codec import Codec, Decodes


@dataclass(frozen=True, slots=True)
class ChosenCodec:
    """The codec that a server uses.

    codec: None: KV below DRAM has the form that it has in DRAM. decodes: makes rows from its segments, for pages on the
    model's device; None: nothing is decoded. projection: makes KV from activations, which all tiers below HBM then have
    instead of KV; None: they have KV. divergence: nats a token as measured on this model; None: not measured. warning:
    text for people, if the settings asked for another codec. budget: nats a token to which it was calibrated; None:
    nothing is coded.

    refusals: the file that notes that the codec must not be used. is_refused: it was condemned before. Then it still
    names the KV of earlier starts, and nothing is coded or decoded."""

    codec: Codec | None = None
    decodes: Decodes | None = None
    projection: KvProjection | None = None
    divergence: float | None = None
    warning: str | None = None
    budget: float | None = None
    refusals: Path | None = None
    is_refused: bool = False

    def remember(self, verdict: Verdict) -> None:
        """Keep later starts from using a codec that was condemned."""
        if self.refusals is not None and self.codec is not None:
            why = f"the shadow check found {verdict.recent:.2g} nats a token, {verdict.limit:.2g} are tolerated"
            save_refusal(self.refusals, codec=self.codec.name, made_of=text_digest(), why=why)

    @property
    def name(self) -> str:
        if self.projection is not None:
            return self.projection.name
        return "raw" if self.codec is None else self.codec.name
