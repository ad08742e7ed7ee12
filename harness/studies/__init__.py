"""One question and one command each: searches, replay, parity, throughput, early warning, break-even, capacity."""
