"""Models: the decoder and its Hugging Face folders."""
