"""Published claims beside our own results. `claims.yaml` says what is claimed and which data decide; `lowbit claims`
writes `results/claims.md`.

    schema     claims.yaml as checked data
    evidence   the committed runs of a sweep, and one number per run
    estimates  a test on that data: value, interval, number of pairs
    badges     what the interval allows one to say
    page       Markdown and terminal

Left out: throughput, which needs real kernels on a GPU; such claims say so.
"""
