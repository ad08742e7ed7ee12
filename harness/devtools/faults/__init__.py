"""Faults on purpose: sweeps of tiny real cells are killed, starved, stalled and fed damaged files, then audited.

    reference  the cells once, undisturbed
    rounds     the same cells as a sweep under faults, started again after each fault that ends it, until all are done
    audit      every record against the reference: lost, duplicated, mislabelled, altered, unreported, leaked: all 0

    __main__.py         the command
    campaign.py         a reference and rounds until enough faults were injected
    schedule.py         the schedule of faults
    journal.py          a fault, and what happened, line by line
    rounds.py           one round
    open_round.py       a round while it runs, and the settings of the campaign
    sweep_starts.py     starts of a sweep, with damage before and repair after
    driver.py           a sweep on given cells
    cell.py             a cell whose stages fail on purpose
    injector.py         the faults of one cell's process
    in_cell.py          what they do there
    outside.py          faults from outside a sweep
    damage.py           damage to a file, and a full volume
    audit.py            records against the reference
    outcome.py          the outcome of every fault
    report.py           JSON, table and figure

`schedule` decides which fault comes where and when, as a function of a seed. `driver` is a sweep whose launcher starts
`cell` in place of `harness.run.cell`, and `cell` gives that one stages (`harness.run.cell.Stages`) that fail on
purpose. Left out: faults of a Ray cluster (the tests of its launcher kill its workers) and of GPUs.
"""
