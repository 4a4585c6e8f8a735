"""Describes the server that `conftest.py` starts."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KEY = "sk-clients-test"
MODEL = "bundled"
