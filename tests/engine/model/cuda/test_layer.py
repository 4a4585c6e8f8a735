"""Tests whole layers as they run on CUDA, with torch's operations in the place of Triton's kernels: what they answer,
what they save, and how many kernels they launch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from reprise.engine.model import hf_model
from reprise.engine.model.cuda import optimise
from reprise.engine.model.cuda.layer import CudaLayer
from reprise.engine.model.cuda.optimise import optimise_for_cuda
from reprise.engine.model.hf_model import Step, forward, prepare
from reprise.engine.model.pages import blank_pages
from reprise.engine.model.probe import ProbeResult, probe, single_sequence_meta
from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages, PageFormat
from reprise.kernels.kv_copy import gather_rows
from tests.engine.models import family_model, random_ids, tiny_model, vanilla_logits
from tests.engine.paged import PAGE, PLACES, Played, Pool, Saver, Served, serve
from tests.kernels import rows_by_torch

KNOWN = ["llama", "llama_llama3", "qwen2", "qwen2_sliding", "qwen3", "mistral", "phi3"]
# Of an 8 B model, but narrower: how many kernels are launched does not hang on widths.
LLAMA_8B = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 4}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    names = ("takes_norm", "norm", "add_norm", "gated", "place")
    made = SimpleNamespace(**{name: getattr(rows_by_torch, name) for name in names})
    monkeypatch.setattr(optimise, "triton_rows", lambda: made)
    return made


def layers_of(model: nn.Module) -> list[CudaLayer]:
    return [module for module in model.modules() if isinstance(module, CudaLayer)]


def played(served: Served) -> Played:
    """Texts in random chunks, over pages of NaN."""
    saver = Saver(served.probed)
    saver.pool = pool = Pool(served.ours, served.probed.shapes, sink=saver, backend=NaiveAttention())
    texts = [pool.text(random_ids(length, number), pages) for number, (length, pages) in enumerate(PLACES)]
    pool.run(texts, seed=0)
    return Played(served, saver, pool, texts)


@pytest.mark.parametrize("family", KNOWN)
def test_whole_layers_answer_as_the_models_own(family: str, kernels: SimpleNamespace) -> None:
    ours = serve(family_model(family).to(torch.bfloat16), NaiveAttention())
    done = optimise_for_cuda(ours.ours, ours.probed, NaiveAttention())
    assert done.layers == len(layers_of(ours.ours)) == 4
    for text in played(ours).texts:
        wanted = vanilla_logits(ours.vanilla, text.token_ids).float()
        assert (text.logits - wanted).square().mean().sqrt() < 0.03 * wanted.std()


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_what_is_saved_is_what_lies_in_the_pages(family: str, kernels: SimpleNamespace) -> None:
    """Keys are saved as they are before rotation; loaded to elsewhere they are the computed ones, to the bit."""
    ours = serve(family_model(family).to(torch.bfloat16), NaiveAttention())
    assert optimise_for_cuda(ours.ours, ours.probed, NaiveAttention()).layers == 4
    after = played(ours)
    for text in after.texts:
        for layer, shape in enumerate(ours.probed.shapes):
            elsewhere = blank_pages([shape], 4, PAGE, PageFormat(torch.bfloat16))[0]
            slots = torch.arange(len(text.token_ids))
            after.saver.load(text, layer, slots, 0, elsewhere)
            computed = after.pool.rows(layer, text)
            for pool, rows in zip((elsewhere.k, elsewhere.v), computed, strict=True):
                assert torch.equal(gather_rows(pool, slots), rows)


@pytest.mark.parametrize("family", ["gemma2", "granite", "olmo2", "gpt_neox", "stablelm"])
def test_other_layers_stay(family: str, kernels: SimpleNamespace) -> None:
    ours = serve(family_model(family).to(torch.bfloat16), NaiveAttention())
    assert optimise_for_cuda(ours.ours, ours.probed, NaiveAttention()).layers == 0
    assert not layers_of(ours.ours)


def test_layers_that_do_not_rotate_stay_among_others_that_do(kernels: SimpleNamespace) -> None:
    ours = serve(family_model("smollm3").to(torch.bfloat16), NaiveAttention())
    assert optimise_for_cuda(ours.ours, ours.probed, NaiveAttention()).layers == 2
    assert [layer.index for layer in layers_of(ours.ours)] == [0, 2]
    text = played(ours).texts[0]
    wanted = vanilla_logits(ours.vanilla, text.token_ids).float()
    assert (text.logits - wanted).square().mean().sqrt() < 0.03 * wanted.std()


def test_in_float32_layers_stay_because_a_sum_is_rounded_elsewhere(kernels: SimpleNamespace) -> None:
    ours = serve(family_model("llama"), NaiveAttention())
    assert optimise_for_cuda(ours.ours, ours.probed, NaiveAttention()).layers == 0


@pytest.mark.parametrize("name", ["place", "add_norm", "gated"])
def test_kernels_that_give_something_else_are_not_used(name: str, kernels: SimpleNamespace) -> None:
    right = getattr(kernels, name)

    def wrong(*given: Any) -> Any:
        found = right(*given)
        return tuple(1.1 * x for x in found) if isinstance(found, tuple) else 1.1 * found

    setattr(kernels, name, wrong)
    ours = serve(family_model("llama").to(torch.bfloat16), NaiveAttention())
    assert optimise_for_cuda(ours.ours, ours.probed, NaiveAttention()).layers == 0


def test_values_that_are_written_to_the_wrong_place_are_seen(kernels: SimpleNamespace) -> None:
    def place(rows: Tensor, cos: Tensor, sin: Tensor, norms: Any, slots: Tensor, k: Tensor, v: Tensor) -> Any:
        return rows_by_torch.place(rows, cos, sin, norms, slots.flip(0), k, v)

    kernels.place = place
    ours = serve(family_model("llama").to(torch.bfloat16), NaiveAttention())
    assert optimise_for_cuda(ours.ours, ours.probed, NaiveAttention()).layers == 0


# --- launches ---------------------------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts the operations that would launch a kernel: those that make no view, and our kernels as one each."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = function._schema.returns
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        if not is_view and not function.name().startswith(("aten::empty", "aten::new_empty", "aten::detach")):
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))

    def as_one(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel, whose own operations are not counted, because on CUDA it is one."""

        def counted(*given: Any) -> Any:
            before = len(self.names)
            found = kernel(*given)
            self.names[before:] = [name]
            return found

        return counted


class TwoKernels:
    """Attention of decode steps on CUDA, which launches two kernels: parts of contexts, and their sum."""

    name, page_multiple = "two", 16

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        before = len(self._launches.names)
        out = NaiveAttention().forward(q, kv, meta, params)
        self._launches.names[before:] = ["attend", "merge"]
        return out


def launches_a_layer(model: Any, probed: ProbeResult, launches: Launches) -> float:
    """Count those of a decode step of one row."""
    pages = blank_pages(probed.shapes, 1, PAGE, PageFormat(torch.bfloat16))
    step = Step(
        single_sequence_meta(torch.device("cpu"), 4, 1, PAGE), pages.__getitem__, TwoKernels(launches), Ignored()
    )
    outside: list[int] = []
    layers = model.model.layers

    def note(*_: Any) -> None:
        outside.append(len(launches.names))

    handles = [layers[0].register_forward_pre_hook(note), layers[-1].register_forward_hook(note)]
    with torch.inference_mode(), launches:
        forward(model, step, torch.tensor([5]), torch.tensor([4]), torch.tensor([0]))
    for handle in handles:
        handle.remove()
    return (outside[1] - outside[0]) / len(layers)


class Ignored:
    """Receives rows that are saved."""

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None: ...


@pytest.mark.parametrize(("whole", "most"), [(True, 12), (False, 20)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_decode_step_of_an_8b_shape_launches_few_kernels(
    kind: str, whole: bool, most: int, kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """whole: as whole layers, else by parts of them."""
    model = prepare(tiny_model(kind, dtype=torch.bfloat16, **LLAMA_8B))
    probed, launches = probe(model, NaiveAttention(), PAGE), Launches()
    own = launches_a_layer(model, probed, launches)
    for name in ("norm", "add_norm", "gated", "place"):
        setattr(kernels, name, launches.as_one(name, getattr(kernels, name)))
    monkeypatch.setattr(hf_model, "turn_halves", launches.as_one("turn", hf_model.turn_halves))
    if not whole:
        monkeypatch.setattr(optimise, "known_layer", lambda *_: None)
    assert optimise_for_cuda(model, probed, NaiveAttention()).layers == (4 if whole else 0)
    launches.names.clear()
    few = launches_a_layer(model, probed, launches)
    assert own > 30
    assert few <= most, launches.names
