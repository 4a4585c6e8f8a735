"""Tiny random models of every type that is served, saved as a user would have them, with transformers' own beside."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from reprise.engine.model.loading import text_of
from tests.engine.driver import Answer
from tests.engine.model_zoo import tiny_config
from tests.engine.models import FAMILIES, randomise, tiny_model, vanilla_logits

TIE = 1e-4
"""Two tokens whose logits differ by less are a tie: sums of fp32 in another order may decide it otherwise."""


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model in fp32 and the directory from which engines load it."""

    path: Path
    own: Any  # as transformers made it, in eager attention

    def check(self, answer: Answer, context: list[int] | None = None) -> None:
        """Assert that an answer is transformers' own greedy text. context: what the model has read in the place of the
        prompt, if the prompt was cut."""
        assert answer.error is None, answer.error
        assert answer.token_ids
        prompt = answer.prompt if context is None else context
        logits = vanilla_logits(self.own, [*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :]
        behind = logits.amax(-1) - logits.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert behind.max() < TIE, f"token {int(behind.argmax())} of the answer is {behind.max():.2g} behind the best"


def save_model(model_type: str, path: Path) -> SavedModel:
    """Make a random model of a type of `KNOWN_TYPES` that is served, and save it. Raises an exception of transformers,
    or ModelRefused."""
    own = _made(model_type)
    own.save_pretrained(path)
    return SavedModel(path, own)


def _made(model_type: str) -> Any:
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        return tiny_model(family.model_type, **{**family.config, "max_position_embeddings": 4096})
    config = tiny_config(model_type)
    config._attn_implementation = "eager"
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        try:
            model = _whole(config)
        except Exception:  # sizes of a tower that do not fit together: the text is all that is served
            model = text_of(config).make(torch.float32)
    model = model.eval()
    randomise(model, 0)
    return model.float().requires_grad_(False)


def _whole(config: Any) -> Any:
    """Return the model with its towers, as checkpoints have it."""
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            kind = mapping[type(config)]
            return kind(config)
    raise LookupError(config.model_type)
