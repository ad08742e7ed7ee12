"""vLLM as a rollout engine: real kernels on an NVIDIA GPU, the same engine on a CPU.

engine.py            the engine: load weights, generate, calibrate, sleep, read back
builds.py            the two builds of vLLM, and their differences as one table
settings.py          from a plan to vLLM's arguments
warm.py              DeepGEMM's kernels, compiled before a run
memory.py            estimates of memory, before anything is loaded
cpu_fixes.py         corrections of vLLM's CPU build
weights.py           one push of weights, whichever way it takes
export.py            a stream of weights to the tensors of a checkpoint
push_by_reload.py    a push through vLLM's own loaders
push_by_kernels.py   a push by kernels that write straight into the engine's parameters
streamed_push.py     a push that comes in pieces
shards.py            one rank's share of a model that several devices hold together
experts.py           a mixture's experts: their places, and what their kernels answer
adapters.py          low-rank adapters through vLLM's LoRA support
kv.py                scales of an FP8 KV cache
decoding.py          sampling through vLLM's model runner and scheduler
device_loop.py       decoding that stays on the device until every row has ended
samples.py           sampled tokens and log-probs of a batch
passport.py          weights and input formats measured on the live kernels
"""
