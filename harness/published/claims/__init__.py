"""Published claims beside our own results. `claims.yaml` says what is claimed and which data decide; `lowbit claims`
writes `results/claims.md`.

    kinds      the kinds of tests
    schema     claims.yaml as checked data
    evidence   the committed runs of a sweep, and one number per run
    speed      the throughput map's answer to a test of speed
    estimates  a test on that data: value, interval, number of pairs
    badges     what the interval allows one to say
    page       Markdown and terminal

Left out: the speed of training and of whole RL systems; such claims say so.
"""
