"""Natural mismatch: k3 of our stand-ins by format, length, size and entropy, beside published values of real models.

values.yaml    published values with their sources
values.py      that file, checked
ours.py        k3 of uncorrected rollouts at the first step of committed runs, and of committed probes
page.py        tables and sentences
figure.py      the figure

No number is typed by hand but those of values.yaml. Left out: mismatch after training, which claims look at.
"""
