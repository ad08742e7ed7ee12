"""The embedded engine: the trainer's own decoder samples, with every format emulated bit for bit.

engine.py     load weights, generate, calibrate, read back
supports.py   formats and features that it can emulate
weights.py    checkpoint tensors quantized and dequantized into fused matrices
slabs.py      the parts of those weights that are quantized in one call
adapters.py   low-rank adapters, kept unmerged
residual.py   the second pass over the inputs of low-bit linear layers
forward.py    prefill, then one token per row and step
kv_cache.py   the key-value cache
sampling.py   tokens drawn from the full softmax
exact.py      sampling by the trainer's own forward pass, for zero mismatch
"""
