"""Texts after a changed history: what a model says next when its KV was coded, cut, or read in part."""
