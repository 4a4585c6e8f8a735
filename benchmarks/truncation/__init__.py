"""What truncation costs in speed and in quality."""
