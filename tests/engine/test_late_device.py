"""Runs the engine on a device that does what it is given late, and in any order that fences allow: texts are those of a
recompute.

The model computes at once, as it does on the CPU. But what it has written to pages and for the tiers below HBM is taken
away again, and is there when the device gets to it. The threads of the transfer run as they always do.
"""

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.cache.transfer import transfer
from reprise.engine.model.batch import BatchInput
from tests.cache.transfer.scrambled_streams import ScrambledStreams
from tests.engine.driver import Answer, Driver
from tests.engine.models import VOCAB, family_model

MIB = 1 << 20
CONVERSATIONS, TURNS = 5, 4


class LateDevice(ScrambledStreams):
    """A scrambled device for several threads: the thread that waits for a fence has the device go on."""

    def __init__(self, seed: int, *, obeys: bool = True) -> None:
        super().__init__(random.Random(seed), obeys=obeys)
        self._lock = threading.Lock()
        self.under_way = 0  # steps that were not done when their forward pass returned

    def go_on(self) -> None:
        with self._lock, torch.inference_mode():
            able = [stream for stream in self._streams if stream.can_go_on]
            if able:
                self._rng.choice(able).go_on()
                return
        time.sleep(1e-5)

    def put_before(self, driver: Driver) -> None:
        """Have the steps of an engine write to this device."""
        compute = driver.compute
        inner, pools = compute.runner.forward, [pool for layer in compute.runner.pages for pool in (layer.k, layer.v)]

        def forward(batch: BatchInput, *arguments: Any) -> Tensor:
            self.compute.fence().wait()  # copies in HBM that come before
            pages, rows = batch.meta.slots // compute._cache.page_size, batch.meta.slots % compute._cache.page_size
            before = [pool[pages, rows] for pool in pools]
            logits = inner(batch, *arguments)
            late = [pool[pages, rows] for pool in pools]
            shown = compute._sink.step.parts if compute._sink is not None and compute._sink.step is not None else []
            late_shown = [part.clone() for part in shown]
            for pool, old in zip(pools, before, strict=True):
                pool[pages, rows] = old
            for part in shown:
                part.fill_(torch.nan)

            def write() -> None:
                for pool, new in zip(pools, late, strict=True):
                    pool[pages, rows] = new
                for part, new in zip(shown, late_shown, strict=True):
                    part.copy_(new)

            self.compute.launch(write)
            if batch.logit_rows.numel():
                self.compute.fence().wait()  # whoever draws waits for logits, and these are computed last
            else:
                self.under_way += 1
            return logits

        compute.runner.forward = torch.inference_mode()(forward)  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "llama"
    family_model("llama").save_pretrained(path)
    return path


def converse(driver: Driver, seed: int) -> dict[str, Answer]:
    """Conversations whose turns come while others run; some of their requests are aborted and asked again."""
    rng = random.Random(seed)
    histories: dict[str, list[int]] = {f"c{number}": [] for number in range(CONVERSATIONS)}
    running: dict[str, tuple[str, Answer]] = {}
    answers: dict[str, Answer] = {}
    turns = dict.fromkeys(histories, 0)
    for _ in range(4000):
        for session, (request_id, answer) in list(running.items()):
            if answer.finish_reason is not None:
                histories[session] = answer.text
                answers[request_id] = answer
                del running[session]
        idle = [session for session in histories if session not in running and turns[session] < TURNS]
        if idle and rng.random() < 0.5:
            session = rng.choice(idle)
            turns[session] += 1
            request_id = f"{session}-{turns[session]}"
            asked = [random.Random(request_id).randrange(3, VOCAB) for _ in range(50)]
            prompt = [*histories[session], *asked]
            if rng.random() < 0.3:
                driver.submit(f"{request_id}-lost", prompt, session=session, max_tokens=3, ignore_eos=True)
                for _ in range(rng.randrange(5)):
                    driver.step()
                driver.engine.abort(f"{request_id}-lost")
            running[session] = (
                request_id,
                driver.submit(request_id, prompt, session=session, max_tokens=3, ignore_eos=True),
            )
        elif driver.engine.has_work():
            driver.step()
        elif not idle:
            break
    driver.run()
    return answers


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    driver = Driver(model, cache_mode="recompute", hbm_tokens=2048)
    return {name: answer.token_ids for name, answer in converse(driver, 0).items()}


def late_driver(model: Path, device: LateDevice, monkeypatch: pytest.MonkeyPatch, **room: Any) -> Driver:
    """room: below HBM, which holds two conversations."""
    monkeypatch.setattr(transfer, "streams_of", lambda _: device)
    driver = Driver(model, cache_mode="attentionstore", hbm_tokens=320, step_tokens=12, **room)
    driver.cache.rates.compute_s = lambda tokens: float(tokens)  # type: ignore[method-assign]  # loads always pay
    device.put_before(driver)
    return driver


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_texts_are_those_of_a_recompute_however_late_the_device_is(
    seed: int, tier: str, model: Path, expected: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice(seed)
    room = {"dram_bytes": 64 * MIB}
    if tier == "disk":
        room = {"dram_bytes": 0, "disk_bytes": 64 * MIB, "disk_dir": str(tmp_path)}  # type: ignore[dict-item]
    driver = late_driver(model, device, monkeypatch, **room)
    answers = converse(driver, seed)
    assert len(answers) == CONVERSATIONS * TURNS
    assert {name: answer.token_ids for name, answer in answers.items()} == expected
    assert driver.engine.stats().prompt_tokens.get(tier, 0) > 100
    assert device.under_way > 10
    driver.close()


def test_without_fences_texts_are_others(
    model: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that the test above can fail: blocks are saved before they are computed, and loaded into pages in use."""
    for seed in range(10):
        device = LateDevice(seed, obeys=False)
        driver = late_driver(model, device, monkeypatch, dram_bytes=64 * MIB)
        answers = converse(driver, seed)
        driver.close()
        if {name: answer.token_ids for name, answer in answers.items()} != expected:
            return
    pytest.fail("nothing hangs on the order")
