"""Tests our path over pages against transformers' own, for each model family, and that a step leaves no state
in the model."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotation

from reprise.engine.model.hf_model import RopeCall, Step, forward, turns_halves
from reprise.engine.model.loading import rope_limit
from reprise.engine.model.probe import single_sequence_meta
from reprise.kernels.attention import BACKENDS
from tests.engine.models import CPU, FAMILIES, VOCAB, copied, family_model, random_ids, tiny_model, vanilla_logits
from tests.engine.paged import PAGE, Played, Pool, Served, Text, optimise, play, serve, slots_of


@pytest.fixture(scope="module")
def llama() -> Served:
    return serve(tiny_model())


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest) -> Served:
    return serve(family_model(request.param))


@pytest.fixture(scope="module", params=["as transformers has it", "with faster modules"])
def played(request: pytest.FixtureRequest, served: Served) -> Played:
    if request.param == "as transformers has it":
        return play(served, seed=10)
    faster = Served(copied(served.ours), served.vanilla, served.probed)
    optimise(faster.ours, served.probed)
    return play(faster, seed=20)


def assert_logits_are_the_models_own(vanilla: Any, texts: list[Text]) -> None:
    for text in texts:
        want = vanilla_logits(vanilla, text.token_ids)
        # Measured: at most 1.1e-6 of the largest logit. A forgotten window, cap or rotation is off by 1e-2 and more.
        assert (text.logits - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.sweep(4)
def test_paged_chunked_logits_are_the_models_own(played: Played) -> None:
    assert_logits_are_the_models_own(played.served.vanilla, played.texts)


@pytest.mark.sweep(4)
def test_saved_kv_comes_back_bit_for_bit(played: Played) -> None:
    """A page gets back from a lower tier what the step itself had written to another."""
    other = Pool(played.served.ours, played.served.probed.shapes)
    for text in played.texts:
        moved = Text(text.token_ids, [(page + 7) % 24 for page in reversed(text.pages)], text.logits)
        for layer in range(len(other.pages)):
            played.saver.load(text, layer, slots_of(moved), 0, other.pages[layer])
            for got, want in zip(other.rows(layer, moved), played.pool.rows(layer, text), strict=True):
                assert torch.equal(got, want)


@pytest.mark.sweep(4)
def test_saved_keys_can_stand_elsewhere(played: Played) -> None:
    """Loaded at later positions, layer 0 is what the model computes for the same tokens there."""
    if not played.served.probed.decouplable:
        pytest.skip("its keys carry their positions")
    shift, text = 41, played.texts[0]
    shapes = played.served.probed.shapes
    computed, loaded = Pool(played.served.ours, shapes), Pool(played.served.ours, shapes)
    longer = computed.text(random_ids(shift, 99) + text.token_ids, [3, 8, 2, 21])
    computed.run([longer], seed=0)
    played.saver.load(text, 0, slots_of(longer)[shift:], shift, loaded.pages[0])
    for got, want in zip(loaded.rows(0, longer), computed.rows(0, longer), strict=True):
        close = 1e-5 * want.abs().max().item()
        torch.testing.assert_close(got[shift:], want[shift:], rtol=0, atol=close)


# --- a step and the rest of the process -------------------------------------------------------------------------------


class During:
    """A sink that does something in the middle of a step."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        if layer == 1:
            self.action()


def run_once(served: Served, sink: During | None) -> None:
    pool = Pool(served.ours, served.probed.shapes, sink=sink)
    pool.run([pool.text(random_ids(40, 1), [0, 1])], seed=1)


def test_other_models_of_the_process_do_not_notice() -> None:
    """Same bits before we take over, between steps, in another thread during a step, and after a step that failed."""
    model = tiny_model()
    vanilla = copied(model)
    ids = random_ids(50, 3)
    want = vanilla_logits(vanilla, ids)
    served = serve(model)
    assert torch.equal(vanilla_logits(vanilla, ids), want)

    meanwhile: list[Tensor] = []

    def in_another_thread() -> None:
        thread = threading.Thread(target=lambda: meanwhile.append(vanilla_logits(vanilla, ids)))
        thread.start()
        thread.join(60)

    run_once(served, During(in_another_thread))
    assert len(meanwhile) >= 2
    assert all(torch.equal(got, want) for got in meanwhile)
    assert torch.equal(vanilla_logits(vanilla, ids), want)

    def fail() -> None:
        raise MemoryError("in the middle of a step")

    with pytest.raises(MemoryError):
        run_once(served, During(fail))
    assert torch.equal(vanilla_logits(vanilla, ids), want)


def test_a_failed_step_leaves_nothing_for_the_next(llama: Served) -> None:
    def fail() -> None:
        raise MemoryError("in the middle of a step")

    with pytest.raises(MemoryError):
        run_once(llama, During(fail))
    assert_logits_are_the_models_own(llama.vanilla, play(llama, seed=50).texts)


def test_our_attention_refuses_to_run_outside_a_step(llama: Served) -> None:
    with pytest.raises(RuntimeError, match="step"):
        llama.ours(input_ids=torch.tensor([[5, 6]]), use_cache=False)


# --- logits of chosen rows --------------------------------------------------------------------------------------------


class WithoutLogitRows(nn.Module):
    """A model that always computes the logits of every row."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool, return_dict: bool) -> Any:
        return self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, return_dict=return_dict
        )  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda model: model, WithoutLogitRows], ids=["keeps rows", "computes all"])
@pytest.mark.parametrize("rows", [[], [29], [0, 7, 29]])
def test_logits_of_the_rows_asked_for(llama: Served, wrap: Callable[[Any], nn.Module], rows: list[int]) -> None:
    ids = random_ids(30, 4)
    pool = Pool(llama.ours, llama.probed.shapes)
    step = Step(single_sequence_meta(CPU, 0, 30, PAGE), pool.pages.__getitem__, BACKENDS["torch_cpu"](), None)
    with torch.inference_mode():
        got = forward(
            wrap(llama.ours), step, torch.tensor(ids), torch.arange(30), torch.tensor(rows, dtype=torch.int64)
        )  # fmt: skip
    assert got.shape == (len(rows), VOCAB)
    torch.testing.assert_close(got, vanilla_logits(llama.vanilla, ids)[rows], rtol=0, atol=1e-4)


# --- rotations --------------------------------------------------------------------------------------------------------


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Dims 2i and 2i + 1 turn together, as GPT-J has it; q, k [1, heads, tokens, dim], cos and sin [1, tokens, dim]."""

    def turned(x: Tensor) -> Tensor:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos[:, None] + other * sin[:, None]

    return turned(q), turned(k)


@pytest.mark.parametrize(("function", "quick"), [(llama_rotation, True), (interleaved, False)])
@pytest.mark.parametrize("width", [8, 12])
def test_a_rotation_of_the_leading_dims(function: Callable[..., Any], quick: bool, width: int) -> None:
    """An argument that is not handed in stays as it is, by the model's own function and by our quicker one."""
    assert turns_halves(function) == quick
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(7, 4, 12, generator=generator), torch.randn(7, 2, 12, generator=generator)
    angles = torch.randn(7, width // 2, generator=generator)
    angles = angles.repeat(1, 2) if quick else angles.repeat_interleave(2, dim=1)
    cos, sin = angles.cos()[None], angles.sin()[None]
    got = RopeCall(function, cos, sin, (), {}, width).rotate(q, k)
    want = function(*(x[..., :width].transpose(0, 1)[None] for x in (q, k)), cos, sin)
    for rows, plain, turned in zip(got, (q, k), want, strict=True):
        torch.testing.assert_close(rows[..., :width], turned[0].transpose(0, 1), rtol=0, atol=1e-6)
        assert torch.equal(rows[..., width:], plain[..., width:])


def test_a_rotation_that_needs_more_is_not_taken_for_the_usual_one() -> None:
    def per_layer(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("not reached")

    assert not turns_halves(per_layer)


# --- how far positions reach ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, None),
        ({"rope_parameters": None}, None),
        ({}, None),
        # The frequencies of these two grow with the longest text seen.
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 256),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, 64),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 128}, 128),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 96},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            96,
        ),
    ],
)
def test_rope_limit(config: dict[str, Any], limit: int | None) -> None:
    assert rope_limit(SimpleNamespace(max_position_embeddings=256, **config)) == limit
