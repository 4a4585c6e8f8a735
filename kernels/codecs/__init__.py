"""Provides codecs for tiers below HBM, which turn a block's rows into a smaller segment and back."""
