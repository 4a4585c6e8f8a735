"""Lists all pairs of settings that exclude each other, and why."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from reprise.app.settings.sections import CODECS


@dataclass(frozen=True, slots=True)
class When:
    """A condition on one setting: that it has one of `values`, or is greater than `above`."""

    setting: str
    values: tuple[Any, ...] = ()
    above: float | None = None

    def value(self, settings: BaseModel) -> Any:
        section, _, key = self.setting.partition(".")
        return getattr(getattr(settings, section), key)

    def holds(self, settings: BaseModel) -> bool:
        value = self.value(settings)
        return value in self.values if self.above is None else value > self.above

    def words(self, settings: BaseModel) -> str:
        """Return the setting's name and value, for people."""
        value = self.value(settings)
        shown = str(value).lower() if isinstance(value, bool) else "(empty)" if value == "" else value
        return f"{self.setting} {shown}"


class Exclusion(NamedTuple):
    one: When
    other: When
    why: str


_CODED = When("cache.codec", tuple(codec for codec in CODECS if codec != "raw"))
_ACTIVATIONS = When("cache.codec", ("activation",))
_CUDA = When("engine.device", ("cuda",))
_EXACT = When("model.exact", ("on",))
_INFINIGEN = When("selector.name", ("infinigen",))
_INT8_PAGES = When("cache.hbm_dtype", ("int8",))
_KV_IN_REDIS = When("cache.redis_gib", above=0)
_LARGER_THAN_HBM = When("cache.larger_than_hbm", (True,))
_NOT_BF16 = When("model.dtype", ("float32", "float16"))
_OFFLOADED = When("weights.offload", ("dram",))
_READS_IN_PART = When("selector.name", ("pairs", "infinigen"))
_SPLIT = When("model.tensor_parallel", above=1)

EXCLUSIONS = (
    Exclusion(_CODED, _EXACT, "coded KV does not come back bit for bit, and activations are computed on anew"),
    Exclusion(_CODED, _SPLIT, "KV that is split among processes cannot be coded yet"),
    Exclusion(_READS_IN_PART, _EXACT, "an answer on a part of its context is another one"),
    Exclusion(_READS_IN_PART, _SPLIT, "heads that are split among processes are read whole"),
    Exclusion(_INT8_PAGES, _CUDA, "int8 is read by kernels for CPUs alone"),
    Exclusion(_INT8_PAGES, _NOT_BF16, "int8 is packed from bfloat16 alone"),
    Exclusion(_INT8_PAGES, _SPLIT, "KV that is split among processes cannot be packed yet"),
    Exclusion(_INT8_PAGES, _READS_IN_PART, "int8 is read whole"),
    Exclusion(_INT8_PAGES, _LARGER_THAN_HBM, "contexts of int8 have to lie in HBM"),
    Exclusion(_LARGER_THAN_HBM, When("cache.mode", ("prefix", "recompute")), "what HBM has no room for lies in DRAM"),
    Exclusion(_LARGER_THAN_HBM, When("cache.dram_gib", (0,)), "what HBM has no room for lies in DRAM"),
    Exclusion(_LARGER_THAN_HBM, _CODED, "a step reads rows from DRAM and decodes none"),
    Exclusion(_LARGER_THAN_HBM, _READS_IN_PART, "what lies in DRAM is read whole"),
    Exclusion(_LARGER_THAN_HBM, _EXACT, "attention to a context in pieces sums in another order"),
    Exclusion(_LARGER_THAN_HBM, _SPLIT, "processes that share a model cannot read DRAM in a step yet"),
    Exclusion(
        _LARGER_THAN_HBM, When("experiment.chunked_prefill", (False,)), "a prompt that HBM cannot hold comes in pieces"
    ),
    Exclusion(_OFFLOADED, _ACTIVATIONS, "loads use the weights of a layer outside of its turn"),
    Exclusion(_OFFLOADED, _INFINIGEN, "its guess uses the weights of a layer outside of its turn"),
    Exclusion(_OFFLOADED, _EXACT, "nothing proves exactness of weights that pass through HBM yet"),
    Exclusion(_OFFLOADED, _SPLIT, "processes that share a model keep their weights in HBM"),
    Exclusion(_KV_IN_REDIS, _SPLIT, "KV that is split among processes cannot be kept in Redis yet"),
    Exclusion(_KV_IN_REDIS, When("cache.redis_url", ("",)), "cache.redis_url says which Redis keeps the KV"),
)


def clashes(settings: BaseModel) -> Iterator[str]:
    """Yield an error message for each pair of the given settings that exclude each other."""
    for one, other, why in EXCLUSIONS:
        if one.holds(settings) and other.holds(settings):
            yield f"{one.words(settings)} and {other.words(settings)} exclude each other: {why}"
