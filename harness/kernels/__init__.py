"""Triton kernels of engines and trainers: quantizers and FP8 products, each beside its plain body."""
