import pytest
import torch
from torch import Tensor

from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.prompts import PromptAttention, prompt_attention
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages

PARAMS = AttentionParams(scale=0.3, window=None, softcap=None, sinks=None)
# query rows and context of each sequence: no history, a history that ends within a page, one row
LENS = [(40, 40), (70, 130), (1, 50), (33, 64), (5, 200)]


def literally(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    scores = scale * (q.float() @ k.float().repeat_interleave(group, 1).transpose(2, 3))
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[2:], device=q.device).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v.float().repeat_interleave(group, 1)).to(q.dtype), scores.logsumexp(-1)


def a_batch(device: str, dim: int) -> tuple[Tensor, KvPages, AttentionMeta]:
    torch.manual_seed(0)
    tokens, most = sum(rows for rows, _ in LENS), 13
    k, v = torch.randn(2, 70, 16, 2, dim, dtype=torch.bfloat16, device=device)
    meta = AttentionMeta(
        query_lens=[rows for rows, _ in LENS],
        context_lens=[context for _, context in LENS],
        query_start=torch.tensor([0, *(rows for rows, _ in LENS)]).cumsum(0).int().to(device),
        context_len=torch.tensor([context for _, context in LENS]).int().to(device),
        block_table=torch.randperm(70)[: len(LENS) * most].view(len(LENS), most).int().to(device),
        slots=torch.arange(tokens, device=device),
    )
    return torch.randn(tokens, 6, dim, dtype=torch.bfloat16, device=device), KvPages(k, v), meta


def compared(attention: PromptAttention, device: str, dim: int) -> None:
    q, kv, meta = a_batch(device, dim)
    assert attention.takes(q, kv, PARAMS)
    wanted, found = NaiveAttention().forward(q, kv, meta, PARAMS), torch.full_like(q, float("nan"))
    for sequence in range(len(LENS)):
        attention.forward(q, kv, meta, PARAMS, sequence, found)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


def test_history_and_prompt_mix_as_the_formula_says() -> None:
    compared(PromptAttention(literally), "cpu", 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_torchs_kernel_gives_the_same_on_cuda(dim: int) -> None:
    attention = prompt_attention()
    assert attention is not None
    compared(attention, "cuda", dim)


def test_what_the_kernel_does_not_know_goes_another_way() -> None:
    q, kv, _ = a_batch("cpu", 16)
    attention = PromptAttention(literally)
    for field, value in (("window", 4), ("softcap", 3.0), ("sinks", torch.zeros(6))):
        params = AttentionParams(**{"scale": 1.0, "window": None, "softcap": None, "sinks": None, field: value})  # type: ignore[arg-type]
        assert not attention.takes(q, kv, params)
    assert not attention.takes(q.float(), kv, PARAMS)
    assert not attention.takes(q, KvPages(kv.k, kv.v[..., :8]), PARAMS)
    assert not attention.takes(q[..., :12], KvPages(kv.k[..., :12], kv.v[..., :12]), PARAMS)


@pytest.mark.parametrize(("rows", "context", "is_long"), [(63, 4095, False), (64, 64, True), (2, 4096, True)])
def test_few_rows_behind_little_are_not_worth_it(rows: int, context: int, is_long: bool) -> None:
    assert PromptAttention.is_long(rows, context) == is_long
