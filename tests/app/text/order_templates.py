"""Small templates that refuse, lose or move messages, in the shapes that families of models have."""

from typing import Any

from reprise.app.text.answer_form import AnswerForm
from reprise.app.text.probe import Message
from reprise.app.text.template import ChatTemplate

START, END = "<|im_start|>", "<|im_end|>\n"
OPENING = START + "assistant\n"
SAID = START + "{{ m.role }}\n{{ m.content }}" + END
OPENS = "{% if add_generation_prompt %}" + OPENING + "{% endif %}"
REFUSE = "{{ raise_exception('no') }}"

CHATML = "{% for m in messages %}" + SAID + "{% endfor %}" + OPENS
# Qwen 3.5 and later.
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + REFUSE
    + "{% endif %}"
    + SAID
    + "{% endfor %}"
    + OPENS
)
# Qwen3-VL, gpt-oss.
SILENT = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SAID + "{% endif %}{% endfor %}" + OPENS
# Mistral.
ALTERNATES = (
    "{% set rest = messages %}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "<|im_start|>system\n{{ messages[0].content }}"
    + END
    + "{% endif %}{% set asked = namespace(n=0) %}{% for m in rest %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (asked.n % 2 == 0) %}" + REFUSE + "{% endif %}{% set asked.n = asked.n + 1 %}"
    "{% elif m.role == 'system' %}" + REFUSE + "{% endif %}" + SAID + "{% endfor %}" + OPENS
)
# Gemma 2.
NO_SYSTEM = ALTERNATES.replace("<|im_start|>system\n{{ messages[0].content }}" + END, REFUSE)
# DeepSeek V3 and R1.
HOISTS = (
    "{% set all = namespace(text='') %}{% for m in messages if m.role == 'system' %}"
    "{% set all.text = all.text + m.content %}{% endfor %}{{ all.text }}"
    "{% for m in messages if m.role != 'system' %}" + SAID + "{% endfor %}" + OPENS
)
# Qwen 3.5 and later, with what they do to thoughts: those before the last question are left out. Results of calls stand
# in a user's turn, and are no question.
STRIPS_THOUGHTS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}"
    + END
    + "{% endif %}{% set asked = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set asked.last = loop.index0 %}{% endif %}{% endfor %}{% if asked.last < 0 %}"
    + REFUSE
    + "{% endif %}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + REFUSE
    + "{% elif m.role == 'assistant' %}"
    + OPENING
    + "{% if loop.index0 > asked.last %}<think>\n{{ (m.reasoning_content or '') | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    + END
    + "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% if loop.last or loop.nextitem.role != 'tool' %}"
    + END
    + "{% endif %}{% else %}"
    + SAID
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    + OPENING
    + "<think>\n{% endif %}"
)
# Those of models that see.
PARTS = CHATML.replace(
    "{{ m.content }}", "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{% if m.role == 'system' and m.tools %}<|system|>{{ m.content }}<|tool|>{{ m.tools }}"
    "<|/tool|><|end|>{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}{# tools #}"
)
TEMPLATES = {
    "chatml": CHATML,
    "first only": FIRST_ONLY,
    "silent": SILENT,
    "alternates": ALTERNATES,
    "no system": NO_SYSTEM,
    "hoists": HOISTS,
    "parts": PARTS,
}


class Shown:
    """A template with what was found out of it: renders as the server does."""

    def __init__(self, source: str, tokens: tuple[str, ...] = ()) -> None:
        self.template = ChatTemplate(sources={"default": source}, special_tokens={})
        ids = {token: n for n, token in enumerate(tokens)}
        self.form = AnswerForm.of(self._render, ids, ids.values(), calls="auto", thoughts="auto")

    def text(self, messages: list[Message], *, tools: Any = None, opens: bool = True) -> str:
        shown, shown_tools = self.form.prompt(messages, tools)
        return self._render(self.form.ordered(shown, shown_tools).messages, shown_tools, {}, opens)

    def _render(self, messages: list[Message], tools: Any, args: dict[str, Any], opens: bool) -> str:
        if hasattr(self, "form") and self.form.takes_parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return self.template.render(messages, tools=tools, template_args=args, add_generation_prompt=opens)
