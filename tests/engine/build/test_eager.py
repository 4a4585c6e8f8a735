"""Tests that settings which cost decode graphs are told, once, and that the steps are counted."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reprise.app.observe.engine_metrics import EngineCollector
from reprise.engine.build import first_steps
from reprise.engine.build.eager import why_eager
from reprise.engine.model.hf_model import ModelRunner
from tests.engine.driver import Driver, changed, config
from tests.engine.models import save_tiny


class Planning:
    """A backend whose decode steps can be graphs."""

    name = "triton"

    def num_items(self, context_lens: Any) -> int:
        return 1

    def plans(self, scratch: Any, most_items: int, most_sequences: int) -> dict[str, Any]:
        return {}


def asked(
    *, backend: Any = None, offloaded: Any = None, projection: Any = None, num_ranks: int = 1, **changes: Any
) -> str:
    loaded: Any = SimpleNamespace(num_ranks=num_ranks, offloaded=offloaded)
    probed: Any = SimpleNamespace(backend=backend or Planning(), codec=SimpleNamespace(projection=projection))
    return why_eager(changed(config(Path("model")), **changes), loaded, probed)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, ""),
        ({"exact": "auto"}, ""),
        ({"exact": "on"}, "model.exact on"),
        ({"num_ranks": 2}, "model.tensor_parallel"),
        ({"offloaded": object()}, "weights.offload"),
        ({"projection": object()}, "cache.codec activation"),
        ({"block_scorer": "attended"}, "cache.block_scorer attended"),
        ({"larger_than_hbm": True}, "cache.larger_than_hbm"),
        ({"backend": SimpleNamespace(name="flash")}, "attention by flash"),
        ({"exact": "on", "larger_than_hbm": True}, "model.exact on, cache.larger_than_hbm"),
    ],
)
def test_settings_that_make_every_step_eager_are_named(given: dict[str, Any], told: str) -> None:
    assert asked(**given) == told


def test_a_start_with_such_a_setting_says_so_and_captures_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_steps, "why_eager", lambda *_: "cache.codec activation")
    given: Any = None
    with caplog.at_level(logging.WARNING):
        make = first_steps._graphs_or(ModelRunner, given, given, given, given, torch.device("cuda"))
    assert make is ModelRunner
    assert [record.message for record in caplog.records] == [
        "every step runs without CUDA graphs, which costs several times the time of a token: cache.codec activation"
    ]
    caplog.clear()
    assert first_steps._graphs_or(ModelRunner, given, given, given, given, torch.device("cpu")) is ModelRunner
    assert not caplog.records


def test_decode_steps_that_are_not_replayed_are_counted(tmp_path: Path) -> None:
    driver = Driver(save_tiny(tmp_path / "tiny"))
    driver.ask("cpu", [5, 6, 7], max_tokens=4, ignore_eos=True)
    assert driver.engine.stats().eager_decode_steps == 0, "on a CPU all are eager, and none is to be told of"
    compute = driver.compute
    compute.runner.takes_host_batches, compute._device = True, torch.device("cuda")
    driver.ask("cuda", [5, 6, 7], max_tokens=5, ignore_eos=True)
    stats = driver.engine.stats()
    assert stats.eager_decode_steps == 4, "the first token comes with the prompt"
    engine: Any = SimpleNamespace(state="ready", restarts=0, stats=stats)
    found = {
        sample.name: sample.value for metric in EngineCollector(engine=engine).collect() for sample in metric.samples
    }
    assert found["reprise_eager_decode_steps_total"] == 4
