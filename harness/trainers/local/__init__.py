"""The trainer of one process: forward, backward and optimizer over float32 masters.

trainer.py     the policy, its optimizer and loss scaler
policy.py      the module that is trained, from a prepared decoder
forward.py     one forward pass, within a budget of memory
products.py    FP8 kernels for linear layers, where the device has them
compiling.py   decoder layers compiled one by one
"""
