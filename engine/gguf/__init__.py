"""GGUF files made into what is served: a directory with safetensors, a tokenizer and a configuration."""
