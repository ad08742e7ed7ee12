"""Triton kernels of engines and trainers: quantizers and FP8 products.

quantize.py          launches: one weight quantized straight into an engine's buffers
quantize_bodies.py   the code that the GPU runs for them
fp8_flow.py          the FP8 training flow on a GPU: quantizers, and libraries for the products
fp8_flow_bodies.py   the code that the GPU runs to quantize an operand of that flow
"""
