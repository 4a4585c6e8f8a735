"""Runs the model: turns each step that the scheduler planned into tokens, in a process of its own."""

import os

# Must be set before transformers is imported: it looks for a package called `kernels` to fetch code from a hub, and
# would find ours.
os.environ.setdefault("USE_HUB_KERNELS", "NO")
