"""Shared by all tests: one thread, no network, hypothesis profiles, and factories for the wire's structs."""

import gc
import os

# Set before anything imports torch, and inherited by the servers that tests start: the oracles compare sums bit by
# bit, and the order of a sum depends on the number of threads.
os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Whatever `make setup` has brought: tests speak with the tiny model unless they name another.
os.environ["REPRISE_MODEL__SOURCE"] = "bundled"

from tests.one_name import bare, refuse_bare_names, twice
from tests.shared_certificates import share_certificates

refuse_bare_names()
share_certificates()

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from reprise.scheduler.sequence import SamplingParams, Sequence
from tests.costs import mark_dear, start_early

collect_ignore = ["clients"]  # these have an environment of their own: `make test-clients`

# Time limits per example would only measure the neighbours on a shared machine. `make test-all` takes `ci`, which tries
# four times as many examples; `tests.example_counts.examples` scales the numbers of single tests along.
settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), max_examples=100, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session", autouse=True)
def one_name() -> Iterator[None]:
    """Fail if, at the end of a process that ran tests, a file of ours is loaded under two names, and none under a bare
    one."""
    yield
    assert twice() == bare() == []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Keep all that collecting imports and makes out of the garbage collector, since it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is dear, and skip what needs a GPU where there is none; only then is torch asked."""
    mark_dear(items)
    start_early(items)
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def sampling(**changes: Any) -> SamplingParams:
    """SamplingParams with everything off: plain sampling at temperature 1, 16 tokens, and what `changes` says."""
    neutral: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "seed": 0,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
    }
    return SamplingParams(**{**neutral, **changes})


def greedy(**changes: Any) -> SamplingParams:
    """The most likely token, 16 times, and what `changes` says."""
    return sampling(**{"temperature": 0.0, **changes})


def make_sequence(request_id: str = "r/0", prompt: int | list[int] = 8, **changes: Any) -> Sequence:
    """A waiting Sequence; `prompt` is its token ids or how many of them."""
    token_ids = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    fields: dict[str, Any] = {"tenant": "", "session_id": request_id, "sampling": greedy(), "arrived_s": 0.0}
    return Sequence(request_id=request_id, token_ids=token_ids, prompt_tokens=len(token_ids), **{**fields, **changes})
