"""Published recipes: settings, data and numbers of papers as `sweeps/papers/*.yaml`, launched by `lowbit paper`.

recipe.py   a recipe's file, and the sweep that it becomes with models and data of this machine
twin.py     a recipe's small twin: a random model, its tokenizer and questions, made here
lacks.py    needs of a recipe that this machine or verl does not meet
beside.py   the published numbers beside ours
"""
