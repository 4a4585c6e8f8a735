"""Implements `reprise plan`: computes the machines that a workload needs."""
