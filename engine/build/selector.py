"""Makes the selector, which chooses the parts of long contexts that decoding reads, calibrates it to the model, and
compiles it before the first request."""

import logging
import time

from reprise.engine.build.model import LoadedModel, ProbedModel
from reprise.engine.codec.text import calibration_text
from reprise.engine.config import EngineConfig
from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.moments import measure_moments
from reprise.kernels.attention.selection import Selecting, SelectorInputs
from reprise.kernels.attention.torch_cpu import TorchAttention
from reprise.kernels.selectors import SELECTORS

log = logging.getLogger(__name__)


def build_selector(
    config: EngineConfig,
    loaded: LoadedModel,
    probed: ProbedModel,
    runner: ModelRunner,
    *,
    num_pages: int,
    max_context: int,
) -> Selecting | None:
    """Make the selector of the context rows that decode steps read, calibrate it and install it in the runner.
    Overwrites pages from 0 on, which must not be in use. Returns None if the settings name no selector, so that
    contexts are read whole. Raises ModelRefused."""
    settings = config.selector
    make = SELECTORS[settings.name]
    if make is None:
        return None
    if type(probed.backend) is not TorchAttention:
        raise ModelRefused(
            f"selector.name {settings.name}: contexts are read in part on CPU only, and not where model.exact is on; "
            "set it to none"
        )
    started = time.perf_counter()
    texts, _ = calibration_text(loaded.path / "tokenizer.json")
    rows = min(num_pages * probed.page_size, max_context)
    moments = measure_moments(
        runner, texts, probed.found.ropes, page_size=probed.page_size, most_rows=rows, device=loaded.device
    )
    inputs = SelectorInputs(share=settings.share, num_pages=num_pages, page_size=probed.page_size, moments=moments)
    selecting = Selecting(make(inputs), settings.min_context)
    if selecting.takes(rows):
        # One step of a selector that is thrown away, because that compiles kernels and another selector keeps no trace.
        runner.selecting = Selecting(make(inputs), settings.min_context)
        tables = BlockTables(max_seqs=1, max_pages=-(-rows // probed.page_size))
        item = BatchItem("selector", [0], rows - 1, list(range(-(-rows // probed.page_size))), True, partial=True)
        runner.forward(build_batch([item], tables, probed.page_size, loaded.device), None)
    runner.selecting = selecting
    log.info(
        "reading %.0f %% of contexts from %d tokens on, by %s; calibrated in %.0f s",
        100 * settings.share,
        settings.min_context,
        settings.name,
        time.perf_counter() - started,
    )
    return selecting
