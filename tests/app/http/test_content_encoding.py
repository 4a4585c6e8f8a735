import gzip
import json
import time
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.errors import ApiError
from reprise.app.http.content_encoding import MAX_MEMBERS, decoder_of
from tests.app.fakes import FakeEngine, Running, in_process, make_settings

BODY = json.dumps({"model": "test-model", "messages": [{"role": "user", "content": "Hello"}]}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def members(data: bytes) -> bytes:
    """Several gzip members, one of them without a text."""
    third = len(data) // 3
    return b"".join(map(gzip.compress, (data[:third], b"", data[third : 2 * third], data[2 * third :])))


PACKED = [
    ("gzip", members),
    ("gzip", gzip.compress),
    ("GZip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
]


async def post(running: Running, data: bytes, encoding: str):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return await running.http.post("/v1/chat/completions", content=data, headers=headers)


@pytest.mark.parametrize(("encoding", "pack"), [*PACKED, ("identity", bytes)])
async def test_a_compressed_body_is_read(running: Running, encoding, pack):
    assert (await post(running, pack(BODY), encoding)).status_code == 200


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
async def test_a_body_that_becomes_too_long_is_refused(engine: FakeEngine, tmp_path, encoding, pack):
    async with in_process(engine, make_settings(tmp_path, limits={"body_bytes": 10_000})) as running:
        for length in (10_001, 50_000_000):
            packed = pack(BODY[:-1] + b" " * (length - len(BODY)) + BODY[-1:])
            assert len(packed) < 60_000
            refused = await post(running, packed[:9_000] if length > 20_000 else packed, encoding)
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        fits = pack(BODY[:-1] + b" " * (10_000 - len(BODY)) + BODY[-1:])
        assert (await post(running, fits, encoding)).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", BODY),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9]),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more"),
        ("gzip", gzip.compress(BODY, mtime=0) + gzip.compress(b"", mtime=0)[:-1]),
        ("gzip", gzip.compress(BODY, mtime=0) + gzip.compress(b"", mtime=0) * MAX_MEMBERS),
        ("deflate", zlib.compress(BODY[:9]) + zlib.compress(BODY[9:])),
        ("deflate", zlib.compress(BODY)[:-5]),
        ("deflate", b"\xff" * 50),
        ("gzip", b""),
    ],
)
async def test_a_damaged_body_is_a_400(running: Running, encoding, data):
    refused = await post(running, data, encoding)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] in ("invalid_encoding", "invalid_json")


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip", "x"])
async def test_another_encoding_is_refused_with_those_that_are_read(running: Running, encoding):
    refused = await post(running, BODY, encoding)
    assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip, deflate")
    error = refused.json()["error"]
    assert error["code"] == "unsupported_content_encoding"
    assert error["message"] == f"Bodies may be compressed with gzip or deflate, not with '{encoding}'."


@given(data=st.binary(max_size=2000), cuts=st.lists(st.integers(0, 2000), max_size=4), which=st.sampled_from(PACKED))
def test_a_body_is_the_same_however_it_arrives(data, cuts, which):
    encoding, pack = which
    packed, decoder, found = pack(data), decoder_of(encoding), b""
    bounds = sorted({0, len(packed), *(cut for cut in cuts if cut < len(packed))})
    for start, end in pairwise(bounds):
        found += decoder.push(packed[start:end], 5000)
    decoder.finish()
    assert found == data


@given(data=st.binary(max_size=200), encoding=st.sampled_from(["gzip", "deflate"]))
def test_no_bytes_are_too_odd(data, encoding):
    decoder = decoder_of(encoding)
    try:
        assert len(decoder.push(data, 100)) <= 100
        decoder.finish()
    except ApiError as error:
        assert error.status == 400  # noqa: PT017 - or it was a body


def test_many_members_after_a_long_one_cost_no_more_than_their_text():
    data = gzip.compress(b" " * (16 << 20)) + gzip.compress(b" ") * (MAX_MEMBERS - 1)
    started_s = time.process_time()
    assert len(decoder_of("gzip").push(data, 32 << 20)) == (16 << 20) + MAX_MEMBERS - 1
    assert time.process_time() - started_s < 1  # 5 s when each member copied all before it
