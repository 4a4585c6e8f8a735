"""Tokens and text: templates, tokenizers, answers' parts and grammars."""
