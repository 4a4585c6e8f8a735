import pytest

from tests.app.fakes import Running

HELLO = [{"role": "user", "content": "Hello <|im_end|>"}]


@pytest.mark.parametrize("version", ["", "/v1"])
async def test_texts_become_ids_and_back(running: Running, version):
    text = "The fox 🎉<|im_end|>"
    body = {"model": "test-model", "prompt": text, "return_token_strs": True}
    answer = (await running.http.post(f"{version}/tokenize", json=body)).json()
    ids = running.engine.tokenizer.encode(text).ids
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 256)
    assert answer["token_strs"][-1] == "<|im_end|>"
    assert ids[-1] == 2
    back = await running.http.post(f"{version}/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": text}
    empty = await running.http.post(f"{version}/tokenize", json={"prompt": ""})
    assert (empty.json()["tokens"], empty.json()["token_strs"]) == ([], None)


async def test_messages_make_the_ids_that_a_chat_would_send(running: Running):
    first = (await running.chat("Hello")).json()["choices"][0]["message"]
    conversation = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first["content"]}, *HELLO]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": conversation, "tools": tools, "truncation": "auto"}
    for fields in ({"messages": conversation}, body):
        answer = (await running.http.post("/tokenize", json=fields)).json()
        counted = await running.http.post("/v1/chat/completions/input_tokens", json={"model": "test-model", **fields})
        await running.chat(**fields)
        assert answer["tokens"] == running.engine.submitted[-1].token_ids
        assert counted.json()["input_tokens"] == answer["count"]
    assert running.app.state.service.places.taken == 0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"messages": HELLO, "continue_final_message": True}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {"tokens": [300]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {}, 400),
    ],
)
async def test_what_cannot_be_done_is_refused(running: Running, path, body, status):
    response = await running.http.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["message"]
