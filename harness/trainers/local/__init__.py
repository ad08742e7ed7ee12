"""The trainer of one process: forward, backward and optimizer over float32 masters."""
