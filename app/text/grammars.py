"""Builds the grammar that an answer must follow, from its response format and the calls it must make. Grammars are
checked here before a request is queued; the engine enforces them."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, regex_to_lark

from reprise.app.errors import ApiError, invalid
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.tools import CustomFormat, Tool
from reprise.app.text.answer_form import AnswerForm
from reprise.app.text.families.lark import Lark, OfferedTool, TooLarge, json_rule, loosened, most_optional, quoted
from reprise.app.text.lenient_schema import forgiven, has_inexact_number, without_unknown_formats
from reprise.app.text.schema_references import longest_chain

MAX_OPTIONAL = 480  # optional properties of an object; in JSON each takes 4 of the 2,000 items of llguidance's rows
MAX_CHAIN, MAX_RULES = 256, 1024  # definitions of a schema, rules of a grammar that refer to one another
_RULE = re.compile(r"^[ \t]*[A-Za-z_]\w*(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
CHECK_S = 5.0
MAX_GRAMMAR_BYTES = 1 << 20
_LISTING = re.compile(r"^\s*\d+ \| ", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")
_LIMITS = LLParserLimits(verbose_errors=False)
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


async def grammar_of(request: ChatCompletionRequest, form: AnswerForm) -> str:
    """Return the grammar in llguidance's form; "" if the answer is free. form: how the model writes calls. Raises
    ApiError 400."""
    if not _is_constrained(request):
        return ""
    try:
        async with asyncio.timeout(CHECK_S):
            return await asyncio.to_thread(_checked_grammar, request, form)
    except TimeoutError:
        param = param_of(request)
        raise invalid(f"Invalid '{param}': it takes too long to compile.", param, "invalid_schema") from None


def _is_constrained(request: ChatCompletionRequest) -> bool:
    return _must_call(request) or _own_grammar(request) is not None or _wanted_answer(request) is not None


def _checked_grammar(request: ChatCompletionRequest, form: AnswerForm) -> str:
    """Build and check the grammar of a constrained answer. Large schemas take seconds, so that this runs in a thread.
    Raises ApiError 400."""
    for name, given in _given_formats(request):
        _check_format(name, given)
    param = param_of(request)
    own = _own_grammar(request)
    if own is not None and len(_RULE.findall(own)) > MAX_RULES:
        raise invalid(f"Invalid '{param}': more than {MAX_RULES} rules.", param, "invalid_schema")
    if any(longest_chain(schema) > MAX_CHAIN for schema in _schemas(request)):
        problem = f"references that lead through more than {MAX_CHAIN} definitions"
        raise invalid(f"Invalid '{param}': {problem}.", param, "invalid_schema")
    grammar, problem = _compiled(
        _our_grammar(request, form, forgive=False) if own is None else own, param, hide_place=own is None
    )
    if problem and own is None and _is_lenient_anywhere(request):
        grammar, problem = _compiled(_our_grammar(request, form, forgive=True), param, hide_place=True)
    if problem:
        raise invalid(f"Invalid '{param}': {problem}.", param, "invalid_schema")
    return grammar


def _compiled(lark: str | None, param: str, *, hide_place: bool) -> tuple[str, str]:
    """Return a grammar in llguidance's form, and what is wrong with it; "" if nothing is. lark: None for one that is
    too large. Raises ApiError 400 for that."""
    grammar = None if lark is None else LLMatcher.grammar_from_lark(lark)
    if grammar is None or len(grammar) > MAX_GRAMMAR_BYTES:
        raise invalid(f"Invalid '{param}': the schemas are too large together.", param, "invalid_schema")
    is_bad, problems = _judged(grammar)
    if not is_bad:
        return str(grammar), ""
    return str(grammar), _shown(problems[0], hide_place=hide_place) if problems else "it is not understood"


def _judged(grammar: str) -> tuple[bool, list[str]]:
    """Return whether a grammar is wrong, and what llguidance says of it."""
    try:
        is_bad, problems = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    except Exception:
        raise
    except BaseException:  # a panic of the library, such as one that cuts a message inside of a character
        return True, ["it is not understood"]
    return is_bad, [str(problem) for problem in problems]


def _is_lenient_anywhere(request: ChatCompletionRequest) -> bool:
    given = request.response_format
    is_answer = given is not None and given.json_schema is not None and given.json_schema.strict is False
    return is_answer or any(not tool.function.strict for tool in request.tools or ())


def _can_be_enforced(schema: dict[str, Any]) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": {"lenient": True}}))
    is_bad, _ = _judged(grammar)
    return not is_bad


def _given_formats(request: ChatCompletionRequest) -> Iterator[tuple[str, CustomFormat]]:
    """Yield the grammars that custom tools give for their input, each with the tool's name."""
    for tool in request.tools or ():
        if tool.custom is not None and tool.custom.format is not None and tool.custom.format.type == "grammar":
            yield tool.function.name, tool.custom.format


def _check_format(name: str, given: CustomFormat) -> None:
    """Raise ApiError 400 for a custom tool's grammar that is not understood. It is read alone: a regex that is wrong by
    itself may be right between the parentheses that it gets in a schema."""
    of_tool, definition = f"the {given.syntax} grammar of '{name}'", given.definition or ""
    if given.syntax == "lark" and len(_RULE.findall(definition)) > MAX_RULES:
        raise invalid(f"Invalid 'tools': {of_tool} has more than {MAX_RULES} rules.", "tools", "invalid_schema")
    is_regex = given.syntax == "regex"
    read = LLMatcher.grammar_from_regex if is_regex else LLMatcher.grammar_from_lark
    is_bad, problems = _judged(read(definition))
    if is_bad:
        problem = _shown(problems[0], hide_place=is_regex) if problems else "it is not understood"
        raise invalid(f"Invalid 'tools': {of_tool}: {problem}.", "tools", "invalid_schema")


def _schemas(request: ChatCompletionRequest) -> Iterator[dict[str, Any]]:
    """Yield the JSON schemas that a request's grammar is made of."""
    yield from (tool.function.parameters for tool in request.tools or () if tool.function.parameters)
    given, outputs = request.response_format, request.structured_outputs
    answers = (
        request.guided_json,
        None if outputs is None else outputs.json_,
        None if given is None or given.json_schema is None else given.json_schema.schema_,
    )
    yield from filter(None, answers)


def _our_grammar(request: ChatCompletionRequest, form: AnswerForm, *, forgive: bool) -> str | None:
    """Return the grammar in Lark; None for one that is too large. forgive: leave what cannot be enforced out of lenient
    schemas."""
    try:
        wanted, calls = _wanted_answer(request, forgive=forgive), _call_rules(request, form, forgive=forgive)
    except TooLarge:
        return None
    answer = [] if wanted is None else [f"answer: {wanted()}"]
    names = [name for name, rules in (("answer", answer), ("calls", calls)) if rules]
    return "\n".join([f"start: {' | '.join(names)}", *answer, *calls])


def _shown(problem: str, *, hide_place: bool) -> str:
    """Return llguidance's error as one line, without the grammar listing below it. Positions are removed if the grammar
    is ours, because they mean nothing to the sender of a schema."""
    said = _LISTING.split(problem, maxsplit=1)[0]
    if hide_place:
        said = _PLACE.sub("", said)
    return " ".join(said.split())[:300]


def param_of(request: ChatCompletionRequest) -> str:
    """Return the name of the request field to which an error in the answer's grammar is attributed."""
    if _must_call(request):
        return "tools"
    if request.response_format is not None and request.response_format.type != "text":
        return "response_format"
    fields = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
    return next((name for name in fields if getattr(request, name) is not None), "tools")


def _must_call(request: ChatCompletionRequest) -> bool:
    return request.tool_choice is not None and request.tool_choice.must_call


def _own_grammar(request: ChatCompletionRequest) -> str | None:
    if _must_call(request):
        return None
    outputs = request.structured_outputs
    return request.guided_grammar or (outputs.grammar if outputs is not None else None)


def _wanted_answer(request: ChatCompletionRequest, *, forgive: bool = False) -> Callable[[], str] | None:
    """Return what writes the expression for an answer without calls; None if such an answer is free."""
    if _must_call(request):
        return None
    schema: dict[str, Any] | None = request.guided_json
    lenient = False
    regex, choice = request.guided_regex, request.guided_choice
    if (outputs := request.structured_outputs) is not None:
        schema, regex, choice = outputs.json_, outputs.regex, outputs.choice
        if outputs.json_object:
            schema = _ANY_OBJECT
    if (given := request.response_format) is not None and given.type != "text":
        wanted = given.json_schema
        schema = _ANY_OBJECT if wanted is None or wanted.schema_ is None else wanted.schema_
        lenient = wanted is not None and wanted.strict is False
    if schema is not None:
        return partial(_json_answer, schema, is_lenient=lenient, forgive=forgive, param=param_of(request))
    if regex is not None:
        return lambda: f"/{regex_to_lark(regex)}/"
    if choice is not None:
        return lambda: " | ".join(map(quoted, choice))
    return None


def _call_rules(request: ChatCompletionRequest, form: AnswerForm, *, forgive: bool) -> list[str]:
    if not request.tools or (request.tool_choice is not None and request.tool_choice.type == "none"):
        return []
    allowed = request.tool_choice.names if request.tool_choice is not None else None
    tools = [
        OfferedTool(tool.function.name, _parameters(tool, forgive=forgive), is_lenient=not tool.function.strict)
        for tool in request.tools
        if allowed is None or tool.function.name in allowed
    ]
    lark = Lark(form.special_ids, max_chars=MAX_GRAMMAR_BYTES)
    calls = form.found.calls.taught.grammar(tools, request.parallel_tool_calls is not False, lark)
    return [f"calls: {calls}", *lark.rules]


def _json_answer(schema: dict[str, Any], *, is_lenient: bool, forgive: bool, param: str) -> str:
    schema = _enforceable(schema, is_lenient=is_lenient, forgive=forgive, param=param)
    if most_optional(schema) > MAX_OPTIONAL:
        if not is_lenient:
            raise _too_many_optional(param)
        schema = loosened(schema, MAX_OPTIONAL)
    return json_rule(schema, is_lenient=is_lenient)


def _enforceable(schema: dict[str, Any], *, is_lenient: bool, forgive: bool, param: str) -> dict[str, Any]:
    """Return a schema without formats that nobody can enforce, and of a lenient one, if asked for or if a number would
    be rounded, what can be enforced. Raises ApiError 400 for a strict one whose numbers would be rounded."""
    schema = without_unknown_formats(schema)
    is_inexact = has_inexact_number(schema)
    if is_lenient:
        return forgiven(schema, _can_be_enforced) if forgive or is_inexact else schema
    if is_inexact:
        problem = "a number beyond 2^53 that answers would be compared with, which cannot be kept exactly"
        raise invalid(f"Invalid '{param}': {problem}.", param, "invalid_schema")
    return schema


def _too_many_optional(param: str, of_tool: str = "") -> ApiError:
    problem = f"{of_tool}an object with more than {MAX_OPTIONAL} optional properties"
    return invalid(f"Invalid '{param}': {problem}, which cannot be enforced.", param, "invalid_schema")


def _parameters(tool: Tool, *, forgive: bool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object even if the schema does not say so."""
    schema = tool.function.parameters
    if not schema:
        return _NO_ARGUMENTS
    is_lenient = not tool.function.strict
    if is_lenient and (schema.get("type", "object") is None or isinstance(schema.get("type"), list)):
        schema = {**schema, "type": "object"}
    schema = _enforceable(schema, is_lenient=is_lenient, forgive=forgive, param="tools")
    if most_optional(schema) > MAX_OPTIONAL:
        if tool.function.strict:
            raise _too_many_optional("tools", f"'{tool.function.name}' has ")
        schema = loosened(schema, MAX_OPTIONAL)
    kind = schema.get("type", "object")
    if kind != "object":
        problem = f"the parameters of '{tool.function.name}' must be of type object"
        raise invalid(f"Invalid 'tools': {problem}.", "tools", "invalid_schema")
    return schema if {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys() else {**schema, "type": "object"}
