"""The threads that move KV between the tiers."""
