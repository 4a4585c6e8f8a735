"""Where KV lives. Sans-I/O but for `transfer` and `storage`."""
