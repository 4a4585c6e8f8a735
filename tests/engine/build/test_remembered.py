from pathlib import Path

import pytest

from reprise.engine.build import first_steps, remembered
from reprise.engine.build.engine import build_engine
from reprise.engine.build.remembered import FirstSteps, Remembered, key_of
from reprise.engine.model.warm_up import WarmUp
from tests.engine.driver import config
from tests.engine.models import save_tiny

SHOWN = FirstSteps(step_s=0.1, token_s=0.01, least_chunk_tokens=64, rows_agree=True, proven=True, detail="every row")


def test_what_was_kept_is_recalled_under_its_key_alone(tmp_path: Path) -> None:
    Remembered(tmp_path / "new", "a").keep(SHOWN)
    assert Remembered(tmp_path / "new", "a").recall() == SHOWN
    assert Remembered(tmp_path / "new", "b").recall() is None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["first_steps.json"]


def test_only_the_last_models_stay(tmp_path: Path) -> None:
    for number in range(12):
        Remembered(tmp_path, str(number)).keep(SHOWN)
    found = [number for number in range(12) if Remembered(tmp_path, str(number)).recall() is not None]
    assert found == list(range(4, 12))


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"a": 1}', b'{"a": {"step_s": "x"}}'])
def test_a_damaged_file_is_no_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "first_steps.json").write_bytes(content)
    entry = Remembered(tmp_path, "a")
    assert entry.recall() is None
    entry.keep(SHOWN)
    assert entry.recall() == SHOWN


def test_a_directory_that_cannot_be_written_to_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    entry = Remembered(tmp_path / "file", "a")
    entry.keep(SHOWN)
    assert entry.recall() is None


def test_other_machines_and_other_code_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of("model", 1)
    assert key_of("model", 1) == before
    assert key_of("model", 2) != before
    for name in ("_processor", "_code"):
        with monkeypatch.context() as patched:
            patched.setattr(remembered, name, lambda: "another")
            assert key_of("model", 1) != before


def test_the_second_start_tries_less_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "model")
    tried: list[str] = []
    for name in ("step_times", "efficient_tokens"):
        inner = getattr(WarmUp, name)
        monkeypatch.setattr(WarmUp, name, lambda *a, i=inner, n=name: (tried.append(n), i(*a))[1])
    proof = first_steps._proven
    monkeypatch.setattr(first_steps, "_proven", lambda *a: (tried.append("proof"), proof(*a))[1])
    settings = config(model, disk_dir=str(tmp_path), exact="auto", scheduler_itl_target_s=None)
    first = build_engine(settings)
    assert tried == ["step_times", "efficient_tokens", "proof"]
    second = build_engine(settings)
    assert len(tried) == 3
    assert (second.model.exact, second.model.exactness) == (first.model.exact, first.model.exactness)
    other = build_engine(config(model, disk_dir=str(tmp_path), exact="off", scheduler_itl_target_s=None))
    assert len(tried) > 3
    for engine in (first, second, other):
        engine.close()
