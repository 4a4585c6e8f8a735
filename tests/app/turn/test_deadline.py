import pytest

from reprise.app.errors import ApiError
from reprise.app.turn.deadline import Deadline


def of(*, field_s: float | None = None, header: str | None = None) -> Deadline:
    return Deadline.of(arrived_s=1000.0, field_s=field_s, header=header, limit_s=60.0)


@pytest.mark.parametrize(
    ("field_s", "header", "timeout_s", "by_client"),
    [
        (None, None, 60.0, False),
        (5.0, None, 5.0, True),
        (None, "2.5", 2.5, True),
        (5.0, "2.5", 5.0, True),
        (600.0, None, 60.0, False),
        (None, "86400", 60.0, False),
    ],
)
def test_the_client_may_ask_for_less_than_the_server_allows(field_s, header, timeout_s, by_client):
    deadline = of(field_s=field_s, header=header)
    assert (deadline.at_s, deadline.timeout_s, deadline.by_client) == (1000.0 + timeout_s, timeout_s, by_client)
    error = deadline.error(retry_after_s=7)
    assert (error.status, error.code) == ((408, "request_timeout") if by_client else (503, "overloaded"))
    assert ("retry-after" in error.headers) == (not by_client)


@pytest.mark.parametrize("header", ["", "soon", "0", "-1", "nan", "inf", "86401"])
def test_other_headers_are_refused(header):
    with pytest.raises(ApiError) as error:
        of(header=header)
    assert (error.value.status, error.value.param) == (400, "X-Request-Timeout")
