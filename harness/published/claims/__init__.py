"""Published claims against our own results. `claims.yaml` says what is claimed and which data decide.

    kinds.py         the kinds of tests
    schema.py        claims.yaml as checked data
    evidence.py      the committed runs of a sweep, and one number per run
    speed.py         the throughput map's answer to a test of speed
    update.py        the answer of timed updates to a test of training speed
    domains.py       the settings that a claim speaks of, and where a test lies
    estimates.py     a test on that data: value, interval, number of bases
    moderated.py     the variance of a contrast beside the other arms of its setting
    badges.py        outcomes that an interval allows, and badges
    page.py          Markdown and terminal
    speed_table.py   the speed claims as a table for the throughput report

`lowbit claims` writes `results/claims.md`. Left out: the speed of whole RL systems; such claims say so.
"""
