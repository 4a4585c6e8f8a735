"""The bundled chat model: the code that made it (`corpus.py`, `train.py`) and its weights (`bundled/`)."""
