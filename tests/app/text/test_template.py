import re

import pytest

from reprise.app.text.template import TemplateError
from reprise.app.text.tokenizer import ChatTokenizer
from tests.app.text.test_tokenizer import MESSAGES, TOOLS, byte_level, chat, rendered, saved
from tools.bundled_model.corpus import CHAT_TEMPLATE

TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "whitespace": "  {% for m in messages %}\n  {{ m.content | trim }}\n\n{% endfor %}\n{# note #}\nend\n",
    "tojson": "{{ bos_token }}{{ tools | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}",
    "loops": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% elif loop.last %}{% break %}{% endif %}"
    "{{ m.role }}{% endfor %}",
    "generation": "{% set a = 1 %}{% for m in messages %}{% generation %}{% set a = 2 %}{{ m.content }}"
    "{% endgeneration %}{{ a }}{% endfor %}",
    "namespace": "{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = ns.x * 2 %}{% endfor %}{{ ns.x }}"
    "{{ dict(a=1) | tojson }}",
    "variables": "{{ eos_token }}|{{ documents is none }}|{{ tools is none }}|{{ nothing is defined }}"
    "|{{ add_generation_prompt }}|{{ thinking }}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_transformers_renders_them(tmp_path, name, tools):
    import transformers  # slow to load; a requirement of the project, so its lack is a failure

    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    directory = saved(
        tmp_path / "model", byte_level(), tokenizer_class="PreTrainedTokenizerFast", **tokens,
        chat_template=TEMPLATES[name],
    )  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = ChatTokenizer.load(directory)
    expected = theirs.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True, thinking=True
    )
    text = ours.render(MESSAGES, tools=tools, template_args={"thinking": True}, add_generation_prompt=True)
    assert text == expected
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + none }}", "NoneType"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.missing.field }}", "missing"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "underscore"),
        ("{{ 'x' * 1000000000 }}", "too long"),
        ("{{ 10 ** 10 ** 10 }}", "too large"),
        ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "too long"),
        ("{{ '\\ud800' }}", "surrogates"),
    ],
)
def test_what_a_template_must_not_do_is_a_template_error(tmp_path, template, message):
    with pytest.raises(TemplateError, match=re.escape(message)) as caught:
        rendered(chat(tmp_path, template))
    assert len(str(caught.value)) <= 1000


def test_arguments_cannot_replace_the_messages(tmp_path):
    tokenizer = chat(tmp_path, "{{ messages | length }}{{ tools }}{{ x }}")
    assert rendered(tokenizer, messages=MESSAGES, x=7) == "4None7"
    text = tokenizer.render(
        MESSAGES, tools=None, template_args={"messages": [], "tools": 1, "x": 7}, add_generation_prompt=False
    )
    assert text == "4None7"
