"""Converts GGUF files into directories that can be served: safetensors, tokenizer and configuration."""
