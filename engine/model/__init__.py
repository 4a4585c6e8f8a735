"""Loads a model, checks that it can be served correctly, and runs it."""

import os

# Must be set before transformers is imported: it looks for a package called `kernels` to fetch code from a hub, and
# would find ours.
os.environ.setdefault("USE_HUB_KERNELS", "NO")
