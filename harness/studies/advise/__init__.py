"""Advice: which rollout format and correction for a model, a length and some GPUs, with the evidence of every number.

    question + probe -> speed of a step (capacity plan over the throughput map, with its measured errors)   `speed`
                     -> verdicts on word problems at two lengths, and their mismatch beside the one given   `accuracy`
                     -> recipes, by those verdicts and then by speed, and configurations                    `recipes`

    question.py        the question, and a probe's k3
    speed.py           a step's speed-up over BF16 rollouts, with its range
    accuracy.py        what a format with a correction did on word problems
    recipes.py         recipes in order
    configurations.py  commands and keys for this project, verl and TRL
    report.py          words
    cases.py           seven questions on one page
    answers.py         a grid of questions as JSON, for the form of the site

Speed and accuracy are answered apart. What the asked model would lose is not known, and no number stands for it: k3
times length, which orders the losses of models that sort digits, does not order those on word problems. Left out:
corrections other than TIS, and IcePop in formats in which it did not run.
"""
