import json
import threading
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from reprise.app.errors import ApiError
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.text import grammars
from reprise.app.text.answer_form import NO_FORM, AnswerForm
from reprise.app.text.families.detect import Found
from reprise.app.text.families.lark import Lark
from reprise.app.text.families.table import FAMILIES
from reprise.app.text.grammars import grammar_of
from reprise.app.text.lenient_schema import KNOWN_FORMATS
from reprise.engine.step.grammar import GrammarCompiler
from tests.app.text.families.samples import SAMPLES, tokenizer_for, written

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "no_args"}},
]
GET = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
NO_ARGS = '<tool_call>\n{"name": "no_args", "arguments": {}}\n</tool_call>'
FORMS = {"tags": NO_FORM, "bare": AnswerForm(found=Found(calls=FAMILIES["llama"]), special_ids={})}
BARE = '{"name": "get", "parameters": {"a": 1}}'


def request(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return ChatCompletionRequest.model_validate(body)


def schema(value: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value, **fields}}}


@pytest.fixture(scope="module")
def tokenizer(model_dir) -> LLTokenizer:
    return LLTokenizer((model_dir / "tokenizer.json").read_text(), n_vocab=300, eos_token=2)


def takes(grammar: str, tokenizer: LLTokenizer, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "style", "good", "bad"),
    [
        (schema(SCHEMA), "tags", ['{"a": 12}'], ['{"a":12}', "{}", '{"a": "b"}', GET]),
        ({"response_format": {"type": "json_object"}}, "tags", ["{}", '{"x": [1, null]}'], ["[]", "1"]),
        ({"guided_json": json.dumps(SCHEMA)}, "tags", ['{"a": 12}'], ["{}"]),
        ({"structured_outputs": {"json": SCHEMA}}, "tags", ['{"a": 12}'], ["{}"]),
        ({"structured_outputs": {"json_object": True}}, "tags", ["{}"], ["1"]),
        ({"guided_regex": "[ab]{2}/c"}, "tags", ["ab/c"], ["a/c"]),
        ({"guided_choice": ['y"es', "no\n"]}, "tags", ['y"es', "no\n"], ["yes", "no"]),
        ({"guided_grammar": 'start: "a" | "b"'}, "tags", ["a"], ["c"]),
        ({"tools": TOOLS, "tool_choice": "required"}, "tags", [GET, NO_ARGS, f"{GET}\n{NO_ARGS}"], ["hm", BARE]),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, "tags", [GET], [f"{GET}\n{GET}"]),
        ({"tools": TOOLS, "tool_choice": "required"}, "bare", [BARE], [GET]),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get"}}},
            "tags", [GET], [NO_ARGS],
        ),
        ({"tools": TOOLS, **schema(SCHEMA)}, "tags", ['{"a": 1}', GET], ["hm"]),
        ({"tools": TOOLS, "tool_choice": "none", **schema(SCHEMA)}, "tags", ['{"a": 1}'], [GET]),
        ({"tools": TOOLS, "tool_choice": "required", **schema(SCHEMA)}, "tags", [GET], ['{"a": 1}']),
    ],
)  # fmt: skip
async def test_what_an_answer_may_be(tokenizer, fields, style, good, bad):
    grammar = await grammar_of(request(**fields), FORMS[style])
    assert [takes(grammar, tokenizer, text) for text in good] == [True] * len(good)
    assert [takes(grammar, tokenizer, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"response_format": {"type": "text"}}])
async def test_most_answers_are_free(fields):
    assert await grammar_of(request(**fields), NO_FORM) == ""


def tool(**parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize("parameters", [{"type": ["object", "null"]}, {"type": "string"}, {"not": {}}])
async def test_schemas_of_tools_are_not_judged_where_no_call_is_forced(parameters):
    assert await grammar_of(request(tools=tool(**parameters), tool_choice="auto"), NO_FORM) == ""


def custom(syntax: str, definition: str) -> list[dict[str, Any]]:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return [{"type": "custom", "custom": {"name": "f", "format": form}}]


@pytest.mark.parametrize(
    ("syntax", "definition", "problem"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "a)(b", "unopened group"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: nothing", 'at 1(8): unknown name: "nothing"'),
        ("lark", "x: /a/", "no start rule found"),
        ("lark", "start: a\n" + "a: b\n" * 1024, "more than 1024 rules"),
    ],
)
async def test_a_custom_tools_grammar_is_read_where_a_call_is_forced_alone(syntax, definition, problem):
    assert await grammar_of(request(tools=custom(syntax, definition)), NO_FORM) == ""
    with pytest.raises(ApiError) as error:
        await grammar_of(request(tools=custom(syntax, definition), tool_choice="required"), NO_FORM)
    assert (error.value.status, error.value.code, error.value.param) == (400, "invalid_schema", "tools")
    assert f"the {syntax} grammar of 'f'" in error.value.message
    assert problem in error.value.message


async def test_rules_of_calls_are_written_in_another_thread_and_only_for_a_grammar(monkeypatch):
    writers = []
    written = Lark.rule

    def rule(self: Lark, *args: str) -> str:
        writers.append(threading.current_thread())
        return written(self, *args)

    monkeypatch.setattr(Lark, "rule", rule)
    await grammar_of(request(tools=TOOLS), NO_FORM)
    await grammar_of(request(tools=TOOLS, guided_grammar='start: "a"'), NO_FORM)
    assert not writers
    await grammar_of(request(tools=TOOLS, tool_choice="required"), NO_FORM)
    assert writers
    assert threading.current_thread() not in writers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (schema({"type": "frobnicate"}), "response_format"),
        (schema({"$ref": "#/$defs/nothing"}), "response_format"),
        (schema({"type": "object", "not": {}}), "response_format"),
        (schema({"type": "string", "pattern": "(?=a)"}), "response_format"),
        (schema({"type": "array", "minItems": 3, "maxItems": 2}), "response_format"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
             "tool_choice": "required"},
            "tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}],
             "tool_choice": "required"},
            "tools",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_is_refused(fields, param):
    with pytest.raises(ApiError) as error:
        await grammar_of(request(**fields), NO_FORM)
    assert (error.value.status, error.value.code, error.value.param) == (400, "invalid_schema", param)
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (schema({"type": "object", "not": {}}), """Invalid 'response_format': Unimplemented keys: ["not"]."""),
        ({"guided_grammar": "start: nothing"}, """Invalid 'guided_grammar': at 1(8): unknown name: "nothing"."""),
    ],
)
async def test_only_a_grammar_of_the_clients_own_is_pointed_into(fields, message):
    with pytest.raises(ApiError) as error:
        await grammar_of(request(**fields), NO_FORM)
    assert error.value.message == message


async def test_a_lenient_schema_keeps_to_what_can_be_enforced(tokenizer):
    grammar = await grammar_of(request(**schema({**SCHEMA, "not": {}}, strict=False)), NO_FORM)
    assert takes(grammar, tokenizer, '{"a": 1}')


DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
UNENFORCEABLE = [
    (DECIMAL, "1.5", None),
    ({"type": "string", "pattern": r"(a)\1"}, '"x"', "1"),
    ({"type": "string", "pattern": r"\cA"}, '"x"', "1"),
    ({"type": "string", "minLength": 2, "pattern": r"(?<!a)"}, '"xy"', '"x"'),
    ({"type": "object", "patternProperties": {"(?=a)": {"type": "integer"}}}, '{"b": "c"}', "1"),
    (
        {"type": "object", "patternProperties": {"(?=a)": {}}, "additionalProperties": False, "properties": {"k": {}}},
        '{"k": 1, "b": "c"}', "1",
    ),
    ({"$ref": "#/$defs/nothing"}, "[1]", None),
    ({"$ref": "http://elsewhere/schema"}, "[1]", None),
    ({"$ref": "#anchor"}, "[1]", None),
    ({"type": "str"}, "[1]", None),
    ({"type": ["string", "str"]}, "[1]", None),
    ({"type": "number", "maximum": 1.7976931348623157e308}, "5", '"x"'),
    ({"type": "integer", "minimum": -(1 << 63)}, "-5", '"x"'),
    ({"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}, "5", "-5"),
    ({"type": "integer", "minimum": 0, "maximum": 10**30}, "5", "-5"),
    ({"const": 1234567890123456789}, "1234567890123456789", None),
    ({"type": "object", "required": None}, "{}", "1"),
    ({"type": "object", "required": "a", "properties": {"a": {"type": "integer"}}}, '{"a": 1}', '{"a": "b"}'),
    ({"type": "object", "additionalProperties": None}, '{"a": 1}', "1"),
    ({"type": "object", "properties": None}, '{"a": 1}', "1"),
    ({"type": "array", "items": None, "minItems": 1}, '["a"]', "[]"),
    ({"type": "array", "minItems": 2.5, "items": {"type": "integer"}}, "[1]", '["a"]'),
    ({"type": None, "enum": ["a", "b"]}, '"a"', '"c"'),
    ({"type": "string", "enum": None}, '"a"', "1"),
    ({"anyOf": None, "type": "string"}, '"a"', "1"),
    ({"anyOf": []}, "1", None),
    ({"type": "number", "multipleOf": 0}, "1", '"a"'),
    ({"type": "string", "maxLength": "5"}, '"abcdefg"', "1"),
    ({"type": "string", "format": "idn-email"}, '"a"', "1"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "good", "bad"), UNENFORCEABLE)
async def test_what_a_lenient_schema_says_else_is_followed(tokenizer, value, good, bad):
    """Only what cannot be enforced is left out, where it stands: in answers, and in arguments of calls."""
    whole = {"type": "object", "properties": {"v": value, "n": {"type": "integer"}}, "required": ["v", "n"]}
    answer = await grammar_of(request(**schema(whole, strict=False)), NO_FORM)
    tools = [{"type": "function", "function": {"name": "get", "parameters": whole}}]
    calls = await grammar_of(request(tools=tools, tool_choice="required"), NO_FORM)
    for grammar, form in ((answer, "%s"), (calls, '<tool_call>\n{"name": "get", "arguments": %s}\n</tool_call>')):
        assert takes(grammar, tokenizer, form % f'{{"v": {good}, "n": 1}}')
        assert not takes(grammar, tokenizer, form % f'{{"v": {good}, "n": "x"}}')
        if bad is not None:
            assert not takes(grammar, tokenizer, form % f'{{"v": {bad}, "n": 1}}')


@pytest.mark.parametrize("name", ["url", "idn-email", "json-pointer", "regex", "binary", "byte", "color", "char"])
@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": False}])
async def test_a_format_that_nobody_knows_is_an_annotation(tokenizer, name, strict):
    grammar = await grammar_of(request(**schema({"type": "string", "format": name}, **strict)), NO_FORM)
    assert takes(grammar, tokenizer, '"x"')
    assert not takes(grammar, tokenizer, "1")


def test_the_formats_that_are_said_to_be_enforced_are_those_of_llguidance():
    for name in KNOWN_FORMATS | {"url", "iri", "uri-reference", "regex", "json-pointer", "time-of-day"}:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        assert bool(LLMatcher.validate_grammar(grammar)) == (name not in KNOWN_FORMATS), name


@pytest.mark.parametrize(
    "value",
    [
        {"const": 1234567890123456789},
        {"enum": [1, [9007199254740993]]},
        {"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740995},
        {"type": "integer", "maximum": 10**30},
    ],
)
@pytest.mark.parametrize("strict", [{}, {"strict": True}])
async def test_a_number_that_would_be_rounded_is_refused_where_it_binds(value, strict):
    whole = {"type": "object", "properties": {"v": value}, "required": ["v"]}
    with pytest.raises(ApiError, match="2\\^53") as error:
        await grammar_of(request(**schema(whole, **strict)), NO_FORM)
    assert (error.value.status, error.value.param) == (400, "response_format")


async def test_numbers_beyond_64_bits_are_taken_where_nothing_is_enforced():
    parameters = {"properties": {"n": {"type": "integer", "default": 12345678901234567890123, "minimum": -(1 << 63)}}}
    asked = request(tools=[{"type": "function", "function": {"name": "get", "parameters": parameters}}])
    assert await grammar_of(asked, NO_FORM) == ""
    kept = asked.tools[0].function.parameters["properties"]["n"]
    assert (kept["default"], kept["minimum"]) == (1.2345678901234568e22, -(1 << 63))


async def test_a_request_cannot_change_the_layout(tokenizer):
    grammar = await grammar_of(request(**schema({**SCHEMA, "x-guidance": {"key_separator": "="}})), NO_FORM)
    assert takes(grammar, tokenizer, '{"a": 1}')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(" * 3}, "guided_regex"),
        ({"guided_json": {"type": "object", "not": {}}}, "guided_json"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs"),
        ({"guided_regex": "((", "response_format": {"type": "text"}}, "guided_regex"),
    ],
)
async def test_the_field_that_was_sent_is_named(fields, param):
    with pytest.raises(ApiError) as error:
        await grammar_of(request(**fields), NO_FORM)
    assert error.value.param == param
    assert error.value.message.startswith(f"Invalid '{param}': ")


FAMILY_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "kind": {"enum": ["sun", "rain"]},
                    "days": {"type": "integer"},
                    "more": {"type": "object"},
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "anything", "parameters": {"type": "object"}}},
]


@pytest.mark.parametrize("family", sorted(SAMPLES))
async def test_required_calls_have_the_form_of_the_models_family(family):
    """Calls as its template writes them are allowed; text and calls with wrong arguments are not."""
    tokenizer = tokenizer_for(family)
    own = LLTokenizer(tokenizer._tokenizer.to_str(), eos_token=tokenizer.encode("<|im_end|>")[0])
    grammar = await grammar_of(request(tools=FAMILY_TOOLS, tool_choice="required"), tokenizer.form)

    def accepts(calls: list[tuple[str, dict[str, Any]]], before: str = "") -> bool:
        matcher = LLMatcher(own, grammar, log_level=0)
        ids = tokenizer.encode(before + written(family, calls))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    full = {"place": 'Zürich "HB"', "kind": "sun", "days": -3, "more": {"in": [1, True, "x"]}}
    assert accepts([("look_up", full)])
    assert accepts([("look_up", {"place": "Rome"})])
    assert accepts([("look_up", {"place": "Rome", "days": 3})])
    assert accepts([("anything", {"x": "y"})])
    if family not in ("llama", "harmony"):
        assert accepts([("look_up", full), ("anything", {})])
    assert not accepts([("look_up", {"place": "Rome"})], before="Hm. ")
    assert not accepts([("remove", {"place": "Rome"})])
    assert not accepts([("look_up", {"place": "Rome", "kind": "hail"})])
    assert not accepts([("look_up", {"place": "Rome", "days": "many"})])
    assert not accepts([("look_up", {"days": 3})])
    named = {"type": "function", "function": {"name": "anything"}}
    grammar = await grammar_of(request(tools=FAMILY_TOOLS, tool_choice=named), tokenizer.form)
    assert not accepts([("look_up", {"place": "Rome"})])


BY_SHAPE = ("qwen-coder", "lfm2", "gemma")  # tagged, Python's and quoted calls, whose arguments have rules of their own


@pytest.mark.parametrize("required", [[], ["p0"], [{}, None, "p0"]])
@pytest.mark.parametrize("family", BY_SHAPE)
async def test_a_tool_may_have_hundreds_of_properties(family, required):
    listed = {f"p{n}": {"type": "integer"} for n in range(480)}
    fields = {"tools": tool(type="object", properties=listed, required=required), "tool_choice": "required"}
    tokenizer = tokenizer_for(family)
    own = LLTokenizer(tokenizer._tokenizer.to_str(), eos_token=tokenizer.encode("<|im_end|>")[0])
    grammar = await grammar_of(request(**fields), tokenizer.form)

    def accepts(*names: str) -> bool:
        matcher = LLMatcher(own, grammar, log_level=0)
        ids = tokenizer.encode(written(family, [("f", dict.fromkeys(names, 1))]))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert accepts("p0", "p70", "p71", "p479")
    assert accepts("p0")
    assert accepts("p70") != bool(required)
    assert accepts() != bool(required)
    assert not accepts("p0", "p71", "p70"), "they stand in the order of the schema"
    assert not accepts("p0", "p500")


@pytest.mark.parametrize("family", ["hermes", "olmo", *BY_SHAPE])
async def test_an_object_with_too_many_optional_properties_may_have_any(family, tmp_path):
    """llguidance holds 2,000 items of a grammar at a time, and an optional property takes up to 4."""
    tokenizer = tokenizer_for(family)
    (tmp_path / "tokenizer.json").write_text(tokenizer._tokenizer.to_str())
    end = tokenizer.encode("<|im_end|>")
    compiler = GrammarCompiler(
        tokenizer=tmp_path / "tokenizer.json", vocab_size=tokenizer._tokenizer.get_vocab_size(), end_ids=tuple(end)
    )

    async def accepts(count: int, *names: str) -> bool:
        listed = {f"p{n}": {"type": "integer"} for n in range(count)}
        fields = {"tools": tool(type="object", properties=listed), "tool_choice": "required"}
        constraint = compiler.compile(await grammar_of(request(**fields), tokenizer.form))
        for token_id in tokenizer.encode(written(family, [("f", dict.fromkeys(names, 1))])):
            if not constraint.allowed(tokenizer._tokenizer.get_vocab_size())[token_id]:
                return False
            constraint.accept(token_id)
        return not constraint.is_failed

    assert await accepts(grammars.MAX_OPTIONAL, "p0", "p479")
    assert not await accepts(grammars.MAX_OPTIONAL, "p479", "p0")
    assert await accepts(grammars.MAX_OPTIONAL + 1, "p479", "p0")
    assert await accepts(3000, "p0", "p2999")


LARGE = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(481)}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": LARGE}}],
          "tool_choice": "required"}, "tools"),
        (schema({"type": "object", "properties": {"deep": {"type": "array", "items": LARGE}}}), "response_format"),
        ({"guided_json": {"$ref": "#/$defs/L", "$defs": {"L": LARGE}}}, "guided_json"),
    ],
)  # fmt: skip
async def test_what_is_to_be_followed_strictly_has_a_bound_of_optional_properties(fields, param):
    with pytest.raises(ApiError, match="more than 480 optional properties") as error:
        await grammar_of(request(**fields), NO_FORM)
    assert (error.value.status, error.value.param) == (400, param)


async def test_a_lenient_answer_keeps_to_what_is_left_of_a_schema(tokenizer):
    asked = {"type": "object", "properties": {"many": LARGE, "a": {"type": "integer"}}, "required": ["many"]}
    grammar = await grammar_of(request(**schema(asked, strict=False)), NO_FORM)
    assert takes(grammar, tokenizer, '{"many": {"p7": "x"}, "a": 1}')
    assert not takes(grammar, tokenizer, '{"many": [], "a": 1}')
    assert not takes(grammar, tokenizer, '{"many": {}, "a": "x"}')
    assert len(LARGE["properties"]) == 481, "the request's schema is not changed"


@pytest.mark.parametrize("family", BY_SHAPE)
async def test_a_grammar_grows_with_the_number_of_properties(family, monkeypatch):
    """Four times as many properties need about four times as many rules, of which none is much longer."""
    monkeypatch.setattr(grammars, "MAX_OPTIONAL", 4000)
    sizes = []
    for count in (1000, 4000):
        parameters = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(count)}}
        fields = {"tools": tool(**parameters), "tool_choice": "required"}
        sizes.append(len(await grammar_of(request(**fields), tokenizer_for(family).form)))
    assert sizes[1] < 5 * sizes[0]


async def test_definitions_are_given_to_the_properties_that_need_them():
    """200 properties and 100 KB of definitions, which one of them needs, fit into 1 MiB."""
    large = {"type": "object", "properties": {f"key_{n}": {"type": "integer"} for n in range(3000)}}
    listed = {f"p{n}": {"$ref": "#/$defs/Day"} if n % 2 else {"type": "integer"} for n in range(200)}
    definitions = {"Day": {"$ref": "#/$defs/Number"}, "Number": {"type": "integer"}, "Large": large}
    arguments = {"type": "object", "properties": {**listed, "large": {"$ref": "#/$defs/Large"}}}
    parameters = {"$ref": "#/$defs/Args", "$defs": {**definitions, "Args": arguments}}
    form = tokenizer_for("qwen-coder").form
    grammar = await grammar_of(request(tools=tool(**parameters), tool_choice="required"), form)
    assert grammar.count("Number") == 2, "all properties that need it share a rule, which names it twice"


@pytest.mark.parametrize("family", BY_SHAPE)
async def test_no_more_rules_are_written_once_they_are_too_large(family, monkeypatch):
    """3,000 properties with a different schema of 100 KB each would be 300 MB."""
    monkeypatch.setattr(grammars, "MAX_OPTIONAL", 3000)
    values = {"type": "object", "enum": ["x" * 100_000]}
    listed = {f"p{n}": {**values, "title": str(n), "required": ["a"]} for n in range(3000)}
    sizes = []
    written = Lark.rule

    def rule(self: Lark, name: str, body: str, *args: str) -> str:
        sizes.append(len(body))
        return written(self, name, body, *args)

    monkeypatch.setattr(Lark, "rule", rule)
    fields = {"tools": tool(type="object", properties=listed), "tool_choice": "required"}
    with pytest.raises(ApiError, match="the schemas are too large together") as error:
        await grammar_of(request(**fields), tokenizer_for(family).form)
    assert (error.value.status, error.value.param) == (400, "tools")
    assert sum(sizes) < 1.2 * (1 << 20)


async def test_long_chains_of_references_and_rules_are_refused_before_they_overflow_a_stack():
    """A chain of 1,000 definitions, or of 3,500 rules, ended the process."""
    definitions: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}}, {"type": "null"}]}
        for n in range(1000)
    }
    deep = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**definitions, "d1000": {"type": "integer"}}}
    with pytest.raises(ApiError, match="references that lead through more than 256 definitions"):
        await grammar_of(request(tools=tool(type="object", **deep), tool_choice="required"), NO_FORM)
    assert await grammar_of(request(tools=tool(type="object", **deep), tool_choice="auto"), NO_FORM) == ""
    rules = "\n".join(["start: r0", *(f'r{n}: "a" r{n + 1}' for n in range(3500)), 'r3500: "b"'])
    with pytest.raises(ApiError, match="more than 1024 rules"):
        await grammar_of(request(guided_grammar=rules), NO_FORM)


@pytest.mark.parametrize("place", range(4))
async def test_a_panic_of_the_library_is_a_problem_of_the_schema(place: int):
    """It cuts what it quotes after 100 bytes, also inside of a character. That is no Exception, so it passed all
    handlers."""
    odd = {"type": "object", "required": {"a": "x" * place + "🎉" * 40}}
    with pytest.raises(ApiError) as error:
        await grammar_of(request(**schema(odd, strict=True)), NO_FORM)
    assert (error.value.status, error.value.param) == (400, "response_format")
    lenient = tool(type="object", properties={"b": {"type": "integer"}}, required=odd["required"])
    assert await grammar_of(request(tools=lenient, tool_choice="required"), NO_FORM)
