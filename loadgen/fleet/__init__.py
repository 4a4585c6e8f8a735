"""Simulates a fleet: many of `reprise.loadgen.sim`'s servers, routed by the gateway's own class, on one virtual
clock."""
