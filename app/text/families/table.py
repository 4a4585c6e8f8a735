"""Names the families of models that write calls and thoughts in a way of their own."""

import re
from dataclasses import dataclass
from typing import Any, Protocol

from reprise.app.text.families.harmony import HarmonyCalls
from reprise.app.text.families.json_calls import JsonCalls
from reprise.app.text.families.lark import Lark, OfferedTool
from reprise.app.text.families.named_json import NamedJson
from reprise.app.text.families.python_calls import PythonCalls
from reprise.app.text.families.quoted_calls import QuotedCalls
from reprise.app.text.families.reading import Reader
from reprise.app.text.families.tagged_calls import TaggedCalls


class Shape(Protocol):
    """A way to write tool calls: how they are read from an answer, written into a prompt, and forced by a grammar."""

    @property
    def openings(self) -> tuple[str, ...]:
        """The markers that may begin calls."""
        ...

    @property
    def at_start(self) -> bool:
        """Whether calls may begin an answer without a marker."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that mark a call or a part of it, any of which may be a special token."""
        ...

    def reader(self) -> Reader: ...

    def written(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        """Return calls, as (name, arguments), in the form in which the model writes them."""
        ...

    def grammar(self, tools: list[OfferedTool], many: bool, lark: Lark) -> str:
        """Return an expression for a call of one of the tools, or for several (many)."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """The models that write tool calls and thoughts (their reasoning) in the same way.

    shapes: how they may write calls; the first is what they are taught. signs: patterns; one found in what a template
    renders, or in the texts of the added tokens, shows that the model is of this family. thoughts: name in THOUGHTS of
    their marks around thoughts; empty: they have none of their own. wrap: tags that may stand around the whole content.
    ignored: marks without a meaning. short_ids: the template takes only ids of calls that have 9 letters and digits.
    """

    name: str
    shapes: tuple[Shape, ...]
    signs: tuple[str, ...]
    thoughts: str = ""
    wrap: tuple[str, str] = ("", "")
    ignored: tuple[str, ...] = ()
    short_ids: bool = False

    @property
    def taught(self) -> Shape:
        return self.shapes[0]

    @property
    def markers(self) -> frozenset[str]:
        return frozenset((*(marker for shape in self.shapes for marker in shape.markers), *self.ignored))

    def shows_in(self, text: str) -> bool:
        return any(re.search(sign, text) for sign in self.signs)


def _tagged(prefix: str, outer: str, *, has_lines: bool = False, line: str = "\n") -> TaggedCalls:
    """Return the shape of calls with `<function=N>` and `<parameter=K>`."""
    return TaggedCalls(
        open=(f"<{prefix}{outer}>",),
        close=(f"</{prefix}{outer}>",),
        head_open="<function=",
        head=re.compile(r"<function=(?P<name>[^>\n]+)>"),
        argument_open="<parameter=",
        argument=re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
        argument_close="</parameter>",
        call_close="</function>",
        written_head="<function={name}>",
        written_argument="<parameter={key}>",
        has_lines=has_lines,
        line=line,
    )


def _attributes(prefix: str, outer: tuple[str, ...], *, is_typed: bool = False) -> TaggedCalls:
    """Return the shape of calls with `<invoke name="N">` and `<parameter name="K">`."""
    kind = r'(?:\s+string="(?P<is_string>true|false)")?' if is_typed else ""
    return TaggedCalls(
        open=tuple(f"<{tag}>" for tag in outer),
        close=tuple(f"</{tag}>" for tag in outer),
        head_open=f"<{prefix}invoke",
        head=re.compile(rf'<{prefix}invoke\s+name="?(?P<name>[^"<>\n]+?)"?\s*>'),
        argument_open=f"<{prefix}parameter",
        argument=re.compile(rf'<{prefix}parameter\s+name="?(?P<key>[^"<>\n]+?)"?{kind}\s*>'),
        argument_close=f"</{prefix}parameter>",
        call_close=f"</{prefix}invoke>",
        written_head=f'<{prefix}invoke name="{{name}}">',
        written_argument=f'<{prefix}parameter name="{{key}}"' + (' string="{is_string}">' if is_typed else ">"),
        is_shared=True,
    )


_TAGS = JsonCalls(open="<tool_call>", close="</tool_call>")
_BARE = JsonCalls(arguments="parameters", is_alone=True)
_PYTHON_TAG = JsonCalls(open="<|python_tag|>", arguments="parameters", newline="", is_alone=True)
_PYTHON = PythonCalls()
_LINES = _tagged("", "tool_call", has_lines=True)
_COMPACT = _tagged("", "tool_call", line="")
_MISTRAL_LIST = JsonCalls(open="[TOOL_CALLS]", is_list=True, newline="", has_ids=True)
_MISTRAL_NAMED = NamedJson(
    begin="[TOOL_CALLS]",
    head=re.compile(r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\](?P<id>[^\[{]*))?\[ARGS\]\s*(?=\{)"),
    before="[TOOL_CALLS]{name}[ARGS]",
    after="",
    more_markers=("[ARGS]", "[CALL_ID]"),
)
_BEGIN, _SEP, _DEEP_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek(before: str, after: str, between: str = "") -> NamedJson:
    return NamedJson(
        open="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        begin=_BEGIN,
        end=_DEEP_END,
        head=re.compile(rf"{_BEGIN}\s*(?:function{_SEP})?(?P<name>[^\s<{{]+)(?:{_SEP}|\n```(?:json)?\n)\s*(?=\{{)"),
        before=f"{_BEGIN}{before}",
        after=f"{after}{_DEEP_END}",
        between=between,
        skipped=("```",),
        more_markers=(_SEP,),
    )


_KIMI = NamedJson(
    open="<|tool_calls_section_begin|>",
    close="<|tool_calls_section_end|>",
    begin="<|tool_call_begin|>",
    end="<|tool_call_end|>",
    head=re.compile(
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<{]+):\d+)\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    before="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    more_markers=("<|tool_call_argument_begin|>",),
)
_GLM = TaggedCalls(
    head_open="<tool_call>",
    head=re.compile(r"<tool_call>\s*(?P<name>[^\s<{\[]+)\s*(?=\n|<arg_key>|</tool_call>)"),
    argument_open="<arg_key>",
    argument=re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    argument_close="</arg_value>",
    call_close="</tool_call>",
    written_head="<tool_call>{name}",
    written_argument="<arg_key>{key}</arg_key>\n<arg_value>",
)
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("harmony", (HarmonyCalls(),), (r"<\|start\|>.*<\|message\|>",), "harmony"),
        Family(
            "deepseek-v3.2",
            (_attributes("｜DSML｜", ("｜DSML｜function_calls", "｜DSML｜tool_calls"), is_typed=True),),
            ("<｜DSML｜",),
        ),
        Family(
            "deepseek-v3",
            (_deepseek(f"function{_SEP}{{name}}\n```json\n", "\n```", "\n"),),
            (f"<｜tool▁call▁begin｜>function{_SEP}",),
        ),
        Family("deepseek-v3.1", (_deepseek(f"{{name}}{_SEP}", ""),), ("<｜tool▁calls▁begin｜>",)),
        Family("kimi", (_KIMI,), (r"<\|tool_calls_section_begin\|>",)),
        Family("gemma", (QuotedCalls("<|tool_call>", "<tool_call|>", '<|"|>'),), (r"<\|tool_call>",), "gemma"),
        Family(
            "functiongemma",
            (QuotedCalls("<start_function_call>", "<end_function_call>", "<escape>"),),
            ("<start_function_(call|declaration)>",),
        ),
        Family("minimax", (_attributes("", ("minimax:tool_call",)),), ("<minimax:tool_call>",)),
        Family("seed", (_tagged("seed:", "tool_call"),), ("<seed:tool_call>",), "seed"),
        Family(
            "command",
            (
                JsonCalls(
                    "<|START_ACTION|>",
                    "<|END_ACTION|>",
                    is_list=True,
                    name="tool_name",
                    arguments="parameters",
                    first='"tool_call_id": "{number}", ',
                    newline="",
                    list_edges=("[\n    ", ",\n    ", "\n]"),
                ),
            ),
            (r"<\|START_ACTION\|>",),
            "command",
            ignored=_RESPONSE,
        ),
        Family(
            "lfm2",
            (PythonCalls("<|tool_call_start|>", "<|tool_call_end|>"),),
            (r"<\|tool_call_start\|>", r"<\|tool_list_start\|>"),
        ),
        Family(
            "olmo",
            (PythonCalls("<function_calls>", "</function_calls>", has_brackets=False, between="\n"),),
            ("<function_calls>",),
        ),
        Family("nemotron", (JsonCalls("<TOOLCALL>", "</TOOLCALL>", is_list=True, newline=""),), ("<TOOLCALL>",)),
        Family(
            "hunyuan",
            (JsonCalls("<tool_calls>", "</tool_calls>", is_list=True),),
            ("<tool_calls>",),
            wrap=("<answer>", "</answer>"),
        ),
        Family("longcat", (JsonCalls("<longcat_tool_call>", "</longcat_tool_call>"),), ("<longcat_tool_call>",)),
        Family(
            "internlm",
            (JsonCalls("<|action_start|><|plugin|>", "<|action_end|>", arguments="parameters"),),
            (r"<\|action_start\|>",),
        ),
        Family(
            "apertus",
            (JsonCalls("<|tools_prefix|>", "<|tools_suffix|>", is_list=True, newline="", is_keyed=True),),
            (r"<\|tools_prefix\|>",),
        ),
        Family(
            "phi",
            (
                JsonCalls("<|tool_call|>", "<|/tool_call|>", is_list=True, newline=""),
                JsonCalls("functools", is_list=True, newline=""),
            ),
            (r"<\|/tool_call\|>", r"<\|tool\|>"),
        ),
        Family(
            "granite",
            (JsonCalls("<|tool_call|>", is_list=True, newline=""), _TAGS),
            (r"<\|tool_call\|>",),
        ),
        Family("glm", (_GLM, _TAGS), ("<arg_key>",)),
        Family("mimo", (_COMPACT, _TAGS), (r"<parameter=[^>\n]+>[^\n<]",)),
        Family("qwen-coder", (_LINES, _TAGS), ("<function=",)),
        Family("hermes", (_TAGS, _LINES), ("<tool_call>",)),
        Family("mistral-args", (_MISTRAL_NAMED, _MISTRAL_LIST), (r"\[ARGS\]",), "mistral", short_ids=True),
        Family(
            "mistral",
            (_MISTRAL_LIST, _MISTRAL_NAMED),
            (r"\[TOOL_CALLS\]", r"\[AVAILABLE_TOOLS\]"),
            "mistral",
            short_ids=True,
        ),
        Family("pythonic", (_PYTHON, _BARE), (r"\[?\b\w+\(\w+=",)),
        Family(
            "llama",
            (_BARE, _PYTHON_TAG, _PYTHON, _TAGS),
            (r'"name": "?[\w ]+"?, "parameters": (?!\{"type")', r"<\|python_tag\|>"),
        ),
    )
}
"""The families by their names in `model.calls`. The first one whose signs are there is taken, so those with signs of
their own come before those with common ones."""
OWN = FAMILIES["hermes"]  # for templates that do not support tools
UNKNOWN = FAMILIES["llama"]  # for templates that support tools and show no sign
