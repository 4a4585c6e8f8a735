"""Finds modules that keep a state besides KV, such as that of a recurrence, a short convolution or an indexer of keys.

In transformers all of them ask the cache object for the state that they kept. Our steps pass no cache, so such a module
would begin without a state in every chunk, and raise no error.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from reprise.engine.model.hf_model import attention_implementation

_ASKS_FOR_A_STATE = (
    "get_conv_state",
    "update_conv_state",
    "get_recurrent_state",
    "update_recurrent_state",
    "update_indexer",
)


@dataclass(frozen=True, slots=True)
class KeptState:
    """A module that keeps a state: it asked transformers' cache object for something other than K and V."""

    module: str  # the name of its class
    layer: int


def find_states(model: nn.Module, token_ids: Tensor) -> list[KeptState]:
    """Run the model's own attention once over token_ids [tokens] int64 and return the modules that ask for a state.
    Finds none in a model that does not take a cache of transformers' kind."""
    running: list[nn.Module] = []
    found: dict[KeptState, None] = {}

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    handles = [m.register_forward_pre_hook(enter) for m in model.modules()]
    handles += [m.register_forward_hook(leave, always_call=True) for m in model.modules()]
    try:
        with attention_implementation(model, "eager"):
            config: Any = model.config
            cache = _listening_cache(
                config, lambda layer: found.setdefault(KeptState(type(running[-1]).__name__, layer))
            )
            model(input_ids=token_ids[None], past_key_values=cache, use_cache=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        pass  # what was asked for until then counts; whether such a model can be driven at all, other checks say
    finally:
        for handle in handles:
            handle.remove()
    return list(found)


def _listening_cache(config: Any, asked: Callable[[int], None]) -> DynamicCache:
    """Return a cache that works as transformers' own does and reports the layer of every state that it is asked for."""

    def reporting(name: str) -> Callable[..., Any]:
        original = getattr(DynamicCache, name)

        def method(*args: Any, **keywords: Any) -> Any:
            asked(inspect.signature(original).bind(*args, **keywords).arguments["layer_idx"])
            return original(*args, **keywords)

        return method

    names = [name for name in _ASKS_FOR_A_STATE if hasattr(DynamicCache, name)]
    kind = type("ListeningCache", (DynamicCache,), {name: reporting(name) for name in names})
    cache: DynamicCache = kind(config=config)
    return cache
