"""The codec that a server uses, as the composition of the engine reads it."""

from dataclasses import dataclass
from pathlib import Path

from reprise.engine.codec.activation import KvProjection
from reprise.engine.codec.refusal_file import save as save_refusal
from reprise.engine.codec.text import text_digest
from reprise.engine.step.ports import Verdict
from reprise.kernels.codecs.codec import Codec, Decodes


@dataclass(frozen=True, slots=True)
class ChosenCodec:
    """codec None: KV below DRAM is what DRAM has. decodes: makes rows of its segments, for pages on the model's device;
    None: nothing is decoded. projection: makes KV of activations, which all tiers below HBM have instead; None: they
    have KV. divergence: nats a token as measured on this model; None: not measured. warning: for people, where
    something else was asked for. budget: nats a token that it was calibrated to; None: nothing is coded.
    refusals: where it is noted that it is not to be used. is_refused: it was condemned before: KV of earlier starts is
    named by it, and none is coded or decoded."""

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
