"""Simulates a fleet: many of `reprise.loadgen.sim`'s servers behind the gateway's own routing, on one virtual clock."""
