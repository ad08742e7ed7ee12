"""Models: the decoder, its Hugging Face folders and its adapters.

decoder.py      the decoder: Qwen2, Qwen3, Qwen3-MoE and bias-free Llama
checkpoint.py   config.json and safetensors, read and written
shards.py       a checkpoint written whole: sharded safetensors and the files beside them
tokenizer.py    a character tokenizer for the embedded models
adapters.py     trained low-rank adapters through peft, and the frozen base under them
"""
