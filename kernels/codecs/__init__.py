"""What tiers below HBM may store instead of raw rows: codecs from a block's rows to a segment and back."""
