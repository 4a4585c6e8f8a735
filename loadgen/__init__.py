"""Measures any server from outside (`reprise load`: `cli.py`, `load.py`), and simulates ours (`simulate.py`)."""
