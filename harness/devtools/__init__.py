"""The harness on itself: benches, fault injection and the environment's setup."""
