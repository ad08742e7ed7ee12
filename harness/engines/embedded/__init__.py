"""The embedded engine: the trainer's own modules sample, with every format emulated bit for bit."""
