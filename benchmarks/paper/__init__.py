"""The papers' figures, from the simulator."""
