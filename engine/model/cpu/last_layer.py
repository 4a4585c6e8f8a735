"""Lets a model's last layer compute its output only for rows whose logits are wanted: of a prompt, only the last
row."""

import torch
from torch import nn

from reprise.engine.model.cpu.layer import DecoderLayer
from reprise.engine.model.cpu.modules import FEW_ROWS
from reprise.engine.model.hf_model import Step, forward, takes_logit_rows
from reprise.engine.model.known_parts import agree
from reprise.engine.model.pages import blank_pages
from reprise.engine.model.probe import ProbeResult, single_sequence_meta
from reprise.kernels.attention.ragged_batch import AttentionBackend, PageFormat

_CHECK_TOKENS = FEW_ROWS + 2  # fewer rows take another path


def finish_wanted_rows_only(
    model: nn.Module, probed: ProbeResult, backend: AttentionBackend, page_format: PageFormat
) -> bool:
    """Have the last layer, if it is a DecoderLayer, finish only the rows whose logits are wanted. Returns whether it
    does. It does so only if a trial gives the same logits with and without skipping, because the modules after the
    layers may do anything."""
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
    if not layers or layers[-1].index != len(probed.shapes) - 1 or not takes_logit_rows(type(model).forward):
        return False
    page = backend.page_multiple
    count = -(-_CHECK_TOKENS // page)
    positions, wanted = torch.arange(_CHECK_TOKENS), torch.tensor([1, _CHECK_TOKENS - 1])
    pages = blank_pages(probed.shapes, count, page, page_format)
    logits = []
    for leave_out in (False, True):
        layers[-1].is_last = leave_out
        step = Step(single_sequence_meta(wanted.device, 0, _CHECK_TOKENS, page), pages.__getitem__, backend, None)
        logits.append(forward(model, step, positions + 1, positions, wanted))
    layers[-1].is_last = agree(logits[1], logits[0])
    return layers[-1].is_last
