"""Tests the parts of which a scripted model is made; `test_served.py` serves one."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.text.tokenizer import ChatTokenizer
from tests.scripted.agents import SCRIPTS, answers, template
from tests.scripted.chain import CannotCut, Cutter, write_model


@given(st.lists(st.text("abc \n", min_size=12, max_size=40), min_size=1, max_size=4))
def test_pieces_are_the_text_and_occur_once(texts: list[str]) -> None:
    cutter = Cutter({"abc", "a b"})
    with suppress(CannotCut):
        for text in texts:
            assert "".join(cutter.cut(text)) == text
    assert len(set(cutter.pieces)) == len(cutter.pieces)
    assert not {"abc", "a b"} & set(cutter.pieces)


def test_all_that_is_said_can_be_cut() -> None:
    for thinks in (False, True):
        cutter = Cutter(set())
        for text in answers(thinks=thinks).values():
            assert "".join(cutter.cut(text)) == text
        assert len(set(cutter.pieces)) == len(cutter.pieces)


@pytest.mark.parametrize("thinks", [False, True])
def test_the_template_counts_the_answers_of_the_client_it_knows(tmp_path: Path, thinks: bool) -> None:
    directory = write_model(tmp_path, template(thinks=thinks), answers(thinks=thinks))
    tokenizer = ChatTokenizer.load(directory)
    assert tokenizer.form.described == {"calls": "hermes", "thoughts": "think", "tools_in": "template"}
    assert tokenizer.form.found.thinks == thinks
    for script in SCRIPTS:
        parameters = {"type": "object", "properties": {}}
        tools = [{"type": "function", "function": {"name": script.tool, "parameters": parameters}}]
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        for step in range(len(script.answers) + 1):
            last = min(step, len(script.answers) - 1)
            shown = {"tools": tools if script.tool else None, "template_args": {}}
            text = tokenizer.render(messages, **shown, add_generation_prompt=True)
            assert text.endswith(f"<|im_start|>assistant\n<|{script.family}_{last}|>")
            assert text.count(f"<|{script.family}_") == step + 1
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
