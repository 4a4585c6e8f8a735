"""The bundled chat model: how it was made (`corpus.py`, `train.py`) and its weights (`bundled/`)."""
