"""Budgets of a step: how much it may compute."""
