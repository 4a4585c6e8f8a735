"""Lets several servers act as one: which replica serves a turn, how they find each other, and how many there should
be."""
