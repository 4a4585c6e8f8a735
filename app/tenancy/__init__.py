"""Who may do how much: keys, places, rates, quotas and weights."""
