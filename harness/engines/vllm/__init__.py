"""vLLM as a rollout engine: real kernels on an NVIDIA GPU, the same engine on a CPU."""
