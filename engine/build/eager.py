"""Says which settings keep decode steps from being replayed as CUDA graphs."""

from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.engine.build.model import LoadedModel, ProbedModel
from reprise.engine.config import EngineConfig
from reprise.engine.model.graph_runner import PlanMaker


def why_eager(config: EngineConfig, loaded: LoadedModel, probed: ProbedModel) -> str:
    """Return the settings that keep steps on CUDA from being replayed as CUDA graphs, so that Python launches their
    kernels one by one; empty if none does. The text is for people and uses the settings' names."""
    found = {
        # A graph has rows that are over, and a product of more rows may round otherwise.
        "model.exact on": config.model.exact == "on",
        "model.tensor_parallel": loaded.num_ranks > 1,
        "weights.offload": loaded.offloaded is not None,
        "cache.codec activation": probed.codec.projection is not None,
        f"cache.block_scorer {config.cache.block_scorer}": (
            BLOCK_SCORERS[config.cache.block_scorer]().needs == "attention"
        ),
        "cache.larger_than_hbm": config.cache.larger_than_hbm,
        f"selector.name {config.selector.name}": config.selector.name != "none",
        f"attention by {probed.backend.name}": not isinstance(probed.backend, PlanMaker),
    }
    return ", ".join(name for name, is_so in found.items() if is_so)
