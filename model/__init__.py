"""The bundled chat model (`bundled/`), and where models lie. The code that made it is in `tools/bundled_model/`."""
