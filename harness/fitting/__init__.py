"""Whole decoders made low-bit: fake quantization, GPTQ, distillation and fitted adapters."""
