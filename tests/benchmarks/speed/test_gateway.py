"""Tests how the gateway's benchmark judges its figures, and the application that it puts behind Ray's proxy."""

from typing import Any

from benchmarks.speed.gateway import RAYS, Measured, summarize
from benchmarks.speed.ray_proxy import stream

OURS = {"direct": Measured([0.001], [0.02], [0.0]), "gateway": Measured([0.002], [0.02], [60.0])}


def with_ray(added_s: float) -> dict[str, Measured]:
    return {**OURS, RAYS[0]: Measured([0.001], [0.02], [30.0]), RAYS[1]: Measured([0.001 + added_s], [0.03], [900.0])}


def test_without_ray_its_arms_are_left_out():
    result = summarize(OURS, 1 << 20)
    assert "rays_proxy" not in result
    assert all(result["held"].values())
    assert result["added_ms"] == 1.0


def test_the_gateway_adds_at_most_a_quarter_of_what_rays_proxy_adds():
    for added_s, holds in ((0.0041, True), (0.0039, False)):
        result = summarize(with_ray(added_s), 1 << 20)
        (expected,) = (name for name in result["held"] if "Ray" in name)
        assert result["held"][expected] is holds
    assert result["rays_proxy"]["cpu_us_per_chunk"]["median"] == 900.0


async def test_the_application_streams_what_is_asked():
    sent: list[dict[str, Any]] = []
    parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.request", "body": b"}"}]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await stream({"type": "http", "query_string": b"tokens=3&gap_ms=0"}, receive, send)
    bodies = [message["body"] for message in sent[1:]]
    assert len(bodies) == 3 + 3  # tokens; the reason, [DONE] and the end
    assert bodies[-2:] == [b"data: [DONE]\n\n", b""]
    assert [message["more_body"] for message in sent[1:]] == [True] * 5 + [False]
