"""Tests what a replica is given before it starts: its directory, its port, its time to drain."""

import os
import socket
import subprocess
import sys

import pytest

from reprise.app.settings.sources import load_settings
from reprise.fleet.supervise import owned_server
from reprise.fleet.supervise.owned_server import address, claim_slot, drain_s, free_port


def test_every_replica_has_a_directory_of_its_own(tmp_path):
    slots = [claim_slot(tmp_path / "state") for _ in range(3)]
    assert [slot.directory.name for slot in slots] == ["replica-0", "replica-1", "replica-2"]
    for slot in slots:
        os.close(slot.lock)


def test_what_follows_a_dead_replica_finds_its_directory(tmp_path):
    first, second = claim_slot(tmp_path), claim_slot(tmp_path)
    (first.directory / "kv").mkdir()
    os.close(first.lock)
    third = claim_slot(tmp_path)
    assert third.directory == first.directory
    assert (third.directory / "kv").is_dir()
    os.close(second.lock)
    os.close(third.lock)


def test_a_directory_stays_taken_while_the_server_lives(tmp_path):
    slot = claim_slot(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[slot.lock], text=True
    ) as server:
        os.close(slot.lock)  # as we do, who started it
        other = claim_slot(tmp_path)
        assert other.directory != slot.directory
        os.close(other.lock)
        server.communicate("\n", timeout=60)
    again = claim_slot(tmp_path)
    assert again.directory == slot.directory
    os.close(again.lock)


def test_there_are_only_so_many(tmp_path, monkeypatch):
    monkeypatch.setattr(owned_server, "MAX_SLOTS", 2)
    slots = [claim_slot(tmp_path) for _ in range(2)]
    with pytest.raises(OSError, match="2 replicas"):
        claim_slot(tmp_path)
    for slot in slots:
        os.close(slot.lock)


def test_a_free_port_can_be_listened_on():
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        pass


def test_an_address_of_ipv6_has_brackets():
    assert address("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert address("fd00::1", 80) == "http://[fd00::1]:80"


def test_it_is_given_longer_than_its_answers_may_take():
    settings = load_settings(flags={"server.drain_s": "40"}, environ={}, config=None)
    assert drain_s(settings) > 40
