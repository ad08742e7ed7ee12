"""The start of a run: its base model and every part's offline preparation.

base_model.py      base models, trained once and cached by content
base_training.py   supervised training of a base, up to an accuracy
prepare.py         task, base and preparations of a run, cached by content
"""
