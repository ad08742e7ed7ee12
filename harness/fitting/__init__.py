"""Whole decoders made low-bit: fake quantization, GPTQ, distillation and fitted adapters.

fake_quant.py        linear layers that train through quantization
gptq_decoder.py      GPTQ over a decoder, block by block
distill.py           knowledge distillation: the loss and its training loop
adapter_start.py     first values of adapters, from weights and their quantization error
adapter_fit.py       adapters fitted so that a low-bit decoder follows its full-precision teacher
low_bit_decoder.py   the forward pass of a quantized decoder with adapters, for that fit
"""
