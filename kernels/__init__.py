"""Kernels: tensors in, tensors out. Imports nothing from the other packages.

From a checkout's root `import kernels` finds this folder, and transformers does import a package of that name, the
hub's. transformers reads its `__version__`, so the version here says that it is too old to be used. `engine` also turns
that import off with transformers' own switch. Raise nothing here: transformers does not expect it.
"""

__version__ = "0.3.0"
