"""Faults on purpose: sweeps of tiny real cells are killed, starved, stalled and fed damaged files, then audited.

    reference  the cells once, undisturbed
    rounds     the same cells as a sweep under faults, started again after each fault that ends it, until all are done
    audit      every record against the reference: lost, duplicated, mislabelled, altered, unreported, leaked: all 0

`schedule` decides which fault comes where and when, as a function of a seed. `driver` is a sweep whose launcher starts
`cell` in place of `harness.run.cell`, and `cell` gives that one stages (`harness.run.cell.Stages`) that fail on
purpose. Left out: faults of a Ray cluster (the tests of its launcher kill its workers) and of GPUs.
"""
