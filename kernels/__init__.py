"""Tensors in, tensors out; imports nothing of ours.

transformers probes for a distribution called `kernels` and parses its version, so ours names one that is too old for
it to use. `engine.model.hf_model` also turns the probe's own switch off.
"""

__version__ = "0.2.0"
