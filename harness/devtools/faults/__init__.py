"""Faults on purpose: sweeps of tiny real cells are killed, starved, stalled and fed damaged files, then audited.

    reference  the cells once, undisturbed
    rounds     the same cells as a sweep under faults, started again after each fault that ends it, until all are done
    audit      every record against the reference: lost, duplicated, mislabelled, altered, unreported, leaked: all 0

`schedule` decides what strikes whom and when, as a function of a seed; `cell` and `driver` are entry points that patch
a cell and a sweep and then run the real ones, so that nothing outside this package knows of faults. Left out: faults of
a Ray cluster (the tests of its launcher kill its workers) and of GPUs.
"""
