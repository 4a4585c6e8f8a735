"""A replica's name, which outlives it, and its address."""

import socket
from pathlib import Path

import pytest

from reprise.fleet.replica.identity import own_address, replica_name
from tests.app.fakes import make_settings


def test_a_name_is_kept(tmp_path):
    name = replica_name(tmp_path)
    assert replica_name(tmp_path) == name
    (tmp_path / "replica").write_text("no name: \n at all")
    assert replica_name(tmp_path) not in (name, "no name: \n at all")


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("replica-1", "replica-1"),
        ("::1", "[::1]"),
        ("0.0.0.0", socket.gethostname()),
        ("::", socket.gethostname()),
    ],
)
def test_one_that_listens_everywhere_is_reached_by_its_machines_name(
    host: str, reached_at: str, tmp_path: Path
) -> None:
    server = {"host": host, "port": 8123, "allow_unauthenticated": True}
    assert own_address(make_settings(tmp_path, server=server)) == f"http://{reached_at}:8123"
