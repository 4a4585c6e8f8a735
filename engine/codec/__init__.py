"""What a lossy codec of KV does to a model's answers, and how it is calibrated to do little."""
