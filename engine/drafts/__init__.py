"""Drafts continuations of answers, which a step computes before the answers have said them."""
