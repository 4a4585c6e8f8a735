"""Kernels: tensors in, tensors out. Imports nothing from the other packages.

transformers probes for a distribution called `kernels` and parses its version, so `__version__` names one that is too
old for transformers to use. `engine` also turns the probe off with transformers' own switch.
"""

__version__ = "0.2.0"
