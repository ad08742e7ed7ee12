"""Number formats and low-precision arithmetic as pure functions of tensors.

formats.py             number formats as data: element, scale tile, scale rule
rounding.py            rounding to the elements of a format
scales.py              from the largest magnitude of a tile to its scale, rule by rule
tiles.py               views of a tensor by the tiles that share a scale
quantize.py            quantize and dequantize any format
grids.py               the grid that the values of a weight lie on
effective_bits.py      bits that a format and its side structures store for a weight
packing.py             codes as int32 words and bytes, as checkpoints store them
nf4.py                 NF4 as bitsandbytes stores it
gptq.py                GPTQ for one weight
low_rank.py            low-rank factors of a quantization error: SVD, CLoQ
invariant_scaling.py   a factor moved from a weight into the gain of the norm before it
noise_schedule.py      noise of AQN by step
linear.py              linear layers that compute as a low-precision engine or trainer does
casting.py             16-bit training of a whole model in float32 arithmetic
fp8_flow.py            a linear layer whose three products are FP8
fp8_gemm.py            those three products over codes and scales
kv_scales.py           scales of an FP8 KV cache
experts.py             routing of tokens to experts, and the sum over the chosen ones
rms_norm.py            RMSNorm with its gradient written out
logprobs.py            log-probability and entropy of sampled tokens from logits
head_logp.py           the same from the input of the head, in chunks, without whole logits
compiler_options.py    options of every torch.compile, with the width of vectors in the cache key
"""
