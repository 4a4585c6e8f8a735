"""Guesses a layer's queries from the input of the layer before it, for selectors that look ahead (InfiniGen)."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reprise.engine.model.decoder_layers import decoder_layers
from reprise.engine.model.hf_model import Step, current_step, is_in_step
from reprise.engine.model.probe import ProbeResult, RopeSource
from reprise.kernels.attention.selection import LOG2_E


@dataclass(frozen=True, slots=True)
class _Guess:
    """The parts of a layer that make its queries, taken before the layer was replaced."""

    norm: nn.Module
    projection: nn.Module
    query_norm: nn.Module | None
    rope: RopeSource | None
    scale: float
    k_dim: int

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return the guessed queries: hidden [rows, width] -> fp32 [rows, heads, k_dim], rotated, multiplied by scale *
        log2(e)."""
        queries: Tensor = self.projection(self.norm(hidden)).unflatten(1, (-1, self.k_dim))
        if self.query_norm is not None:
            queries = self.query_norm(queries)
        if self.rope is not None:
            queries = self.rope.rotate(queries, positions)
        return queries.float() * (self.scale * LOG2_E)


class Lookahead:
    """A guesser of each layer's queries from the input of the layer before it, while a model runs. It is made before
    the model's layers are replaced by faster ones, because it copies their norms and query projections. `watch` later
    hooks the replaced layers to see their inputs. Called by the thread that runs the model."""

    def __init__(self, model: nn.Module, found: ProbeResult) -> None:
        """Copy the parts that compute the queries of each layer: norms, query projection, rotation. Raises ValueError
        for layers of another structure."""
        self._guesses: list[_Guess] = []
        for number, layer in enumerate(decoder_layers(model, len(found.shapes))):
            attention: Any = getattr(layer, "self_attn", None)
            projection: Any = getattr(attention, "q_proj", None)
            norm: Any = getattr(layer, "input_layernorm", None)
            if type(projection) is not nn.Linear or norm is None:
                raise ValueError(f"layer {number} has no q_proj behind an input_layernorm")
            # Shallow copies: the weights are the model's own.
            query_norm = copy.copy(getattr(attention, "q_norm", None))
            rope, params = found.ropes[number], found.params[number]
            self._guesses.append(
                _Guess(
                    norm=copy.copy(norm),
                    projection=copy.copy(projection),
                    query_norm=query_norm,
                    rope=rope,
                    scale=params.scale,
                    k_dim=found.shapes[number].k_dim,
                )
            )

    def watch(self, model: nn.Module) -> None:
        """Have every layer but the last guess the queries of the next one, in steps whose selector uses guesses."""
        for number, layer in enumerate(decoder_layers(model, len(self._guesses))[:-1]):
            layer.register_forward_pre_hook(self._hook(number + 1), with_kwargs=True)

    def _hook(self, layer: int) -> Callable[..., None]:
        def guess(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            step: Step | None = current_step() if is_in_step() else None
            if step is None or step.selection is None or not step.selection.selector.looks_ahead:
                return
            hidden: Tensor = arguments[0] if arguments else named["hidden_states"]
            candidates = step.selection.candidates
            positions = torch.tensor(candidates.contexts, device=hidden.device) - 1
            step.selection.guesses[layer] = self._guesses[layer](hidden[0, candidates.tokens], positions)

        return guess
