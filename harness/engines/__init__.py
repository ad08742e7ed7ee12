"""What generates: the embedded engine here, vLLM beside it."""
