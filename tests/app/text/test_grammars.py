import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from reprise.app.errors import ApiError
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.text.answer_form import NO_FORM, AnswerForm
from reprise.app.text.families.detect import Found
from reprise.app.text.families.table import FAMILIES
from reprise.app.text.grammars import grammar_of
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
