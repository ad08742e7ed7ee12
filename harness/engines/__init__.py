"""Rollout engines: the embedded one, which emulates every format in torch, and vLLM.

adapter_shapes.py  low-rank adapters that a plan has, and a check of a push against them
factory.py         the engine of a run, and the check that it can do the run
plain_record.py    a passport line of what is held as it is
requests.py        the arguments of one `generate`, checked and laid out
weight_stream.py   a stream of weights, read once and checked against the model's shapes
embedded/          the embedded engine
vllm/              vLLM as an engine
"""
