"""Tests what a template is told of how much the model is to think."""

import pytest

from tests.app.text.order_templates import CHATML, Shown

OFF_BY_WORD = CHATML + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
ON_BY_WORD = CHATML + "{% if thinking %}<think>{% endif %}"
EFFORT = CHATML + "Reasoning: {{ reasoning_effort or 'medium' }}"
TWO_EFFORTS = (
    "{% if reasoning_effort and reasoning_effort not in ('none', 'high') %}{{ raise_exception('none or high') }}"
    "{% endif %}{{ reasoning_effort }}" + CHATML
)
BOTH = OFF_BY_WORD + "{{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("template", "thinks", "effort", "args"),
    [
        (CHATML, False, "high", {}),
        (OFF_BY_WORD, None, None, {}),
        (OFF_BY_WORD, False, None, {"enable_thinking": False}),
        (OFF_BY_WORD, True, None, {}),  # it thinks without a word
        (OFF_BY_WORD, None, "none", {"enable_thinking": False}),
        (OFF_BY_WORD, None, "minimal", {"enable_thinking": False}),
        (OFF_BY_WORD, None, "low", {}),
        (OFF_BY_WORD, None, "max", {}),
        (OFF_BY_WORD, True, "none", {}),
        (ON_BY_WORD, None, None, {}),
        (ON_BY_WORD, True, None, {"thinking": True}),
        (ON_BY_WORD, False, None, {}),
        (ON_BY_WORD, None, "low", {"thinking": True}),
        (EFFORT, None, "xhigh", {"reasoning_effort": "xhigh"}),
        (EFFORT, None, None, {}),
        (EFFORT, False, None, {"reasoning_effort": "none"}),
        (TWO_EFFORTS, None, "minimal", {"reasoning_effort": "none"}),
        (TWO_EFFORTS, None, "medium", {"reasoning_effort": "high"}),
        (TWO_EFFORTS, None, "max", {"reasoning_effort": "high"}),
        (BOTH, None, "minimal", {"reasoning_effort": "minimal"}),
        (BOTH, None, "none", {"enable_thinking": False, "reasoning_effort": "none"}),
        (BOTH, False, "high", {"enable_thinking": False, "reasoning_effort": "high"}),
    ],
)
def test_a_wish_becomes_the_arguments_that_the_template_reads(template, thinks, effort, args):
    assert Shown(template).form.template_args(thinks=thinks, effort=effort) == args
