"""The model: loading it, proving it and running it."""

import os

# Before transformers is imported: it looks for a package called `kernels` to fetch code from a hub, and ours is none.
os.environ.setdefault("USE_HUB_KERNELS", "NO")
