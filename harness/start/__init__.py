"""The start of a run: its base model and every part's offline preparation.

base_model.py       base models, trained once and cached by content
base_process.py     one base trained in a process of its own
base_training.py    supervised training of a base, up to an accuracy
text_training.py    the same for tasks in words, whose answers have many right wordings
text_documents.py   packed documents of that training
text_step.py        one optimizer step on them
muon.py             Muon, an optimizer for matrices, as a CUDA graph can hold it
prepare.py          task, base and preparations of a run, cached by content
"""
