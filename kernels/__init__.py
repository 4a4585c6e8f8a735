"""Kernels: tensors in, tensors out. Imports nothing from the other packages.

From a checkout's root `import kernels` finds this folder. transformers may mean another package by that name, Hugging
Face's `kernels` from PyPI, and would use this folder instead. It reads `__version__` first, so this folder has a
version that transformers takes for too old to use. `engine` also turns that import off with transformers' own switch.
Raise nothing here: transformers does not expect it.
"""

__version__ = "0.4.0"
