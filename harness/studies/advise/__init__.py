"""Advice: which rollout format and correction for a model, a length and some GPUs, with the evidence of every number.

    question + probe -> speed of a step (capacity plan over the throughput map, with its measured errors)   `speed`
                     -> change of accuracy (runs of the dose study: the interval of like doses)             `accuracy`
                     -> recipes, those whose risk is answered first, and configurations                     `recipes`

    question.py        the question, and a probe's k3
    speed.py           a step's speed-up over BF16 rollouts, with its range
    accuracy.py        the change of accuracy: known, by the dose alone, or not known
    recipes.py         recipes in order
    configurations.py  commands and keys for this project, verl and TRL
    report.py          words
    cases.py           seven questions on one page
    answers.py         a grid of questions as JSON, for the form of the site

Speed and accuracy are answered apart. A number that no committed record supports is "not known". Left out: corrections
other than truncated importance sampling, because their curves rest on too few settings.
"""
