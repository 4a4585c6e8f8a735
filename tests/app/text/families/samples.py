"""Small templates in the shapes that families of models use, each with the special tokens it writes."""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from reprise.app.text.answer_form import AnswerForm
from reprise.app.text.answer_parts import AnswerParts, AnswerWriter, Wanted
from reprise.app.text.template import ChatTemplate
from reprise.app.text.tokenizer import ChatTokenizer
from reprise.app.turn.answer import Answer
from reprise.engine.messages import Output

JSON = '{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}'
TAGGED = "{% for k, v in f.arguments.items() %}%s{% endfor %}"
TEXT = "{{ v if v is string else v | tojson }}"
QUOTED = (
    "{% macro show(v) %}{% if v is string %}Q{{ v }}Q{% elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}"
    "{{ k }}:{{ show(x) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for x in v %}"
    "{{ show(x) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
PYTHON = (
    "{% macro py(v) %}{% if v is string %}{{ v | tojson }}{% elif v is boolean %}{{ 'True' if v else 'False' }}"
    "{% elif v is none %}None{% elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}{{ k | tojson }}: {{ py(x) }}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for x in v %}{{ py(x) }}"
    "{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
IN_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ py(v) }}{{ ', ' if not loop.last }}{% endfor %})"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A family's template in small: what stands before, in, between and after the calls of a message."""

    family: str
    call: str
    before: str = ""
    between: str = ""
    after: str = ""
    taught: str = ""  # what the template says of calls
    special: tuple[str, ...] = ()
    head: str = ""  # macros
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    thoughts: str = "think"
    end: str = "<|im_end|>"  # the token with which an answer with calls ends
    open: str = "<|im_start|>assistant\n"
    values: str = "any"  # arguments that it can show: any, or `text` (nothing that its own tags are in)
    id: str = "call_0123456789abcdef01234567"

    @property
    def template(self) -> str:
        return (
            self.head
            + "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
            + self.taught
            + "<|im_end|>\n{% endif %}{% for m in messages %}"
            + "{% if m.role == 'assistant' %}"
            + self.open
            + "{{ m.content }}{% if m.tool_calls %}"
            + _literal(self.before)
            + "{% for c in m.tool_calls %}{% set f = c.function %}"
            + self.call
            + f"{{% if not loop.last %}}{_literal(self.between)}{{% endif %}}"
            + "{% endfor %}"
            + _literal(self.after)
            + "{% endif %}"
            + self.end
            + "\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            + "{% if add_generation_prompt %}"
            + self.open
            + "{% endif %}"
        )


def _literal(text: str) -> str:
    """A text as an expression of Jinja, which drops a newline after a tag."""
    return f"{{{{ {text!r} }}}}"


def _tagged(prefix: str, edge: str, line: str = "\n") -> str:
    argument = f"<{prefix}parameter=" + "{{ k }}>" + edge + TEXT + edge + f"</{prefix}parameter>" + line
    return f"<{prefix}function=" + "{{ f.name }}>" + line + TAGGED.replace("%s", argument) + f"</{prefix}function>"


def _attributes(prefix: str, kind: str = "") -> str:
    argument = f'<{prefix}parameter name="' + '{{ k }}"' + kind + ">" + TEXT + f"</{prefix}parameter>\n"
    return f'<{prefix}invoke name="' + '{{ f.name }}">\n' + TAGGED.replace("%s", argument) + f"</{prefix}invoke>\n"


DEEP = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_end|>")  # fmt: skip
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
COMMAND = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>",
           "<|END_RESPONSE|>")  # fmt: skip
MISTRAL = ("[TOOL_CALLS]", "[THINK]", "[/THINK]")
_LIST = {"between": ", "}

SAMPLES = {
    sample.family: sample
    for sample in (
        Sample("hermes", f"<tool_call>\n{JSON}\n</tool_call>", between="\n"),
        Sample(
            "qwen-coder",
            "<tool_call>\n" + _tagged("", "\n") + "\n</tool_call>",
            between="\n",
            values="text",
        ),
        Sample("mimo", "<tool_call>" + _tagged("", "", "") + "</tool_call>", between="\n", values="text"),
        Sample(
            "seed",
            "<seed:tool_call>\n" + _tagged("", "") + "\n</seed:tool_call>",
            between="\n",
            thought=("<seed:think>", "</seed:think>"),
            thoughts="seed",
            values="text",
        ),
        Sample(
            "minimax", _attributes(""), before="<minimax:tool_call>\n", after="</minimax:tool_call>", values="text"
        ),
        Sample(
            "deepseek-v3.2",
            _attributes("｜DSML｜", ' string="{{ \'true\' if v is string else \'false\' }}"'),
            before="<｜DSML｜function_calls>\n",
            after="</｜DSML｜function_calls>",
            values="text",
        ),
        Sample(
            "glm",
            "<tool_call>{{ f.name }}\n"
            + TAGGED.replace("%s", "<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT + "</arg_value>\n")
            + "</tool_call>",
            between="\n",
            special=("<tool_call>", "</tool_call>"),
            values="text",
        ),
        Sample(
            "llama",
            '{"name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}',
            between="; ",
            special=("<|python_tag|>",),
        ),
        Sample(
            "pythonic",
            IN_PYTHON,
            "[", ", ", "]",
            head=PYTHON,
        ),
        Sample(
            "olmo",
            IN_PYTHON,
            "<function_calls>\n", "\n", "\n</function_calls>",
            head=PYTHON,
        ),
        Sample(
            "lfm2",
            IN_PYTHON,
            "<|tool_call_start|>[", ", ", "]<|tool_call_end|>",
            head=PYTHON,
            special=("<|tool_call_start|>", "<|tool_call_end|>"),
        ),
        Sample("mistral", JSON, "[TOOL_CALLS][", ", ", "]", special=MISTRAL, thought=MISTRAL[1:], thoughts="mistral"),
        Sample(
            "mistral-args",
            "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
            special=(*MISTRAL, "[ARGS]"),
            thought=MISTRAL[1:],
            thoughts="mistral",
        ),
        Sample("granite", JSON, "<|tool_call|>[", ", ", "]", special=("<|tool_call|>",)),
        Sample("nemotron", JSON, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
        Sample("hunyuan", JSON, "<tool_calls>\n[", ", ", "]\n</tool_calls>"),
        Sample("longcat", f"<longcat_tool_call>\n{JSON}\n</longcat_tool_call>", between="\n"),
        Sample(
            "internlm",
            '<|action_start|><|plugin|>\n{"name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}\n'
            "<|action_end|>",
            between="\n",
            special=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        ),
        Sample(
            "apertus",
            "{{ '{' }}{{ f.name | tojson }}: {{ f.arguments | tojson }}{{ '}' }}",
            "<|tools_prefix|>[", ", ", "]<|tools_suffix|>",
            special=("<|tools_prefix|>", "<|tools_suffix|>"),
        ),
        Sample(
            "command",
            '{"tool_call_id": "{{ loop.index0 }}", "tool_name": {{ f.name | tojson }}, '
            '"parameters": {{ f.arguments | tojson }}}',
            "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>",
            special=COMMAND,
            thought=COMMAND[2:4],
            thoughts="command",
        ),
        Sample(
            "deepseek-v3",
            f"{DEEP[1]}function{DEEP[2]}" + "{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```" + DEEP[3],
            before=DEEP[0],
            between="\n",
            after=DEEP[4],
            special=DEEP,
        ),
        Sample(
            "deepseek-v3.1",
            DEEP[1] + "{{ f.name }}" + DEEP[2] + "{{ f.arguments | tojson }}" + DEEP[3],
            before=DEEP[0],
            after=DEEP[4],
        ),
        Sample(
            "kimi",
            KIMI[1] + "{{ c.id }}" + KIMI[2] + "{{ f.arguments | tojson }}" + KIMI[3],
            before=KIMI[0],
            after=KIMI[4],
            id="functions.{name}:{number}",
        ),
        Sample(
            "gemma",
            "<|tool_call>call:{{ f.name }}{{ show(f.arguments) }}<tool_call|>",
            head=QUOTED.replace("Q", '<|"|>'),
            special=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
            thought=("<|channel>thought\n", "\n<channel|>"),
            thoughts="gemma",
            values="text",
        ),
        Sample(
            "functiongemma",
            "<start_function_call>call:{{ f.name }}{{ show(f.arguments) }}<end_function_call>",
            head=QUOTED.replace("Q", "<escape>"),
            special=("<start_function_call>", "<end_function_call>", "<escape>"),
            values="text",
        ),
        Sample(
            "harmony",
            "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}",
            between="<|call|><|start|>assistant",
            special=HARMONY,
            thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            thoughts="harmony",
            end="<|call|>",
            open="<|start|>assistant",
            taught="<|start|>developer<|message|>",
        ),
        Sample("phi", JSON, "<|tool_call|>[", ", ", "]<|/tool_call|>", special=("<|tool_call|>", "<|/tool_call|>")),
    )
}  # fmt: skip


@functools.cache
def _template(source: str) -> ChatTemplate:
    return ChatTemplate(sources={"default": source}, special_tokens={})


@functools.cache
def tokenizer_of(template: str, special: tuple[str, ...], **chosen: str) -> ChatTokenizer:
    """A tokenizer of bytes, pairs of letters, and special tokens."""
    tokens = list(dict.fromkeys(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["to", "ol", "na", "me", "ar", "Ġ{", '":', "</", "par"]
    merges = [
        ("t", "o"),
        ("o", "l"),
        ("n", "a"),
        ("m", "e"),
        ("a", "r"),
        ("Ġ", "{"),
        ('"', ":"),
        ("<", "/"),
        ("p", "ar"),
    ]
    vocab = {token: n for n, token in enumerate([*tokens[:3], *alphabet, *pairs])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    return ChatTokenizer(tokenizer=tokenizer, template=_template(template), digest=b"", **chosen)


def tokenizer_for(family: str) -> ChatTokenizer:
    sample = SAMPLES[family]
    return tokenizer_of(sample.template, (*sample.special, sample.end))


def write_model(family: str, directory: Path) -> Path:
    """Write a family's tokenizer and template as a model's directory has them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer_for(family)._tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(SAMPLES[family].template, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}', encoding="utf-8")
    return directory


def form_of(family: str) -> AnswerForm:
    return tokenizer_for(family).form


def form_in_text(family: str) -> AnswerForm:
    """The form of a model of which no mark is a token: all that it writes is pushed as text."""
    return replace(form_of(family), special_ids={})


def written(family: str, calls: list[tuple[str, dict[str, Any]]], content: str = "") -> str:
    """The text in which a family's template shows calls: what its models write, without the token at the end."""
    sample = SAMPLES[family]
    entries = [
        {
            "id": sample.id.format(name=name, number=number) if "{" in sample.id else sample.id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": entries}]
    text = _template(sample.template).render(messages, tools=None, template_args={}, add_generation_prompt=False)
    return text.partition(sample.open)[2].removesuffix(f"{sample.end}\n")


@dataclass
class Read:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] | None = None  # with the arguments as they are, or as JSON if they are some
    num_parts: int = 0


def read_text(parser: AnswerWriter, pieces: list[str]) -> Read:
    """Return what the pieces add up to; fail if the parser's own sums differ."""
    said = AnswerParts()
    num_parts = 0
    for parts in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        num_parts += bool(parts.calls)
        said.add(parts)
    return _read(parser, said, num_parts)


def _read(parser: AnswerWriter, said: AnswerParts, num_parts: int) -> Read:
    calls: list[list[str]] = []
    for index, call, arguments in said.calls:
        if call is not None:
            assert index == len(calls)
            calls.append([call.name, ""])
        calls[index][1] += arguments
    assert (parser.content, parser.reasoning) == (said.content, said.reasoning)
    assert [[call.name, call.arguments] for call in parser.calls] == calls
    return Read(said.content, said.reasoning, [(name, _decoded(text)) for name, text in calls], num_parts)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_tokens(
    family: str, text: str, wanted: Wanted, *, end: str | None = None, size: int = 1
) -> tuple[Read, Answer]:
    """Read a text as a family's model would generate it: token by token, `size` of them at once."""
    tokenizer = tokenizer_for(family)
    form = tokenizer.form
    answer = Answer(index=0, tokenizer=tokenizer, min_tokens=0, parser=form.parser(wanted, in_thought=False))
    ids = tokenizer.encode(text + (SAMPLES[family].end if end is None else end))
    said, num_parts = AnswerParts(), 0
    for start in range(0, len(ids), size):
        is_last = start + size >= len(ids)
        delta = answer.push(output(ids[start : start + size], "stop" if is_last else None))
        if delta is not None:
            said.add(delta.parts)
            num_parts += bool(delta.parts.calls)
        if answer.finish_reason is not None:
            break
    return _read(answer._parser, said, num_parts), answer


def output(ids: list[int], finish_reason: str | None) -> Output:
    return Output(
        request_id="r",
        choice=0,
        token_ids=ids,
        logprobs=None,
        finish_reason=finish_reason,
        report=None,
        timings=None,
        error=None,
        error_code=None,
    )
