"""Renders chat templates: Jinja programs that come with a model and turn messages into the text form it was trained
on."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_OUTPUT_CHARS = 1 << 24  # several times what any context window holds
_MAX_REPEAT = 1 << 20
_MAX_EXPONENT = 64


class TemplateError(Exception):
    """The template refused these messages or failed on them. The message may be shown to the client."""


class ChatTemplate:
    """A model's compiled templates: "default" and, if the model has one, "tool_use" for requests with tools.

    Set up as in transformers, so that a model's template renders the same text here. The operator chose the template
    with the model, but clients choose the data: the sandbox keeps both from Python, and the size of the output is
    bounded. The running time is not.
    """

    def __init__(self, *, sources: dict[str, str], special_tokens: dict[str, Any]) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "namespace": _Namespace}
        self.text = "\n".join(sources.values())
        self._special_tokens = special_tokens
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_args: dict[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Render a conversation. `template_args` cannot replace the arguments with names of their own. Raises
        TemplateError."""
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise TemplateError(f"This model needs one of the chat templates {sorted(self._templates)}.")
        variables = {
            "documents": None,
            **self._special_tokens,
            **template_args,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces, length = [], 0
        try:
            for piece in template.generate(variables):
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise TemplateError("The chat template's output is too long.")
                pieces.append(piece)
            text = "".join(pieces)
            text.encode()  # a lone surrogate cannot be encoded and would fail later, inside the tokenizer
        except TemplateError:
            raise
        except Exception as error:  # a template may raise anything
            raise TemplateError(f"The chat template refused the messages: {error}"[:1000]) from error
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that also refuses operators with which a short program makes a huge value."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= _MAX_REPEAT and abs(right) <= _MAX_EXPONENT):
            raise SecurityError("the power is too large")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and len(sequence) * count > _MAX_REPEAT:
                    raise SecurityError("the repetition is too long")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """Supports {% generation %} ... {% endgeneration %}, which marks the assistant's text for training code. Here the
    tags have no effect on the text between them."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """A namespace that refuses names with a leading underscore, because those are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # not called `self`, because a template may use that name
        self, *rest = args
        for name in (attributes := dict(*rest, **kwargs)):
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name}")


def _raise(message: str) -> None:
    raise TemplateError(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - the operator's local date, as everywhere else


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON. Unlike jinja2's own filter, this does not escape HTML characters, which a model should see as
    they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
