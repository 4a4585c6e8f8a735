"""Simulates a fleet: many of `loadgen.sim`'s servers behind the gateway's own routing, on one virtual clock."""
