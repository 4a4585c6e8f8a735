"""Measures any server from outside (`reprise load`: `cli.py`, `measure/`) and simulates Reprise (`virtual/`,
`sim/`)."""
