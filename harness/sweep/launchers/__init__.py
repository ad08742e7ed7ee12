"""Launchers: where the processes of a sweep run.

job.py         a cell with its launch, and the events that a launcher reports
local.py       processes of this machine
ray.py         a Ray cluster
ray_cell.py    the side of the Ray launcher on a node
ray_files.py   files between a results folder and a node
slurm.py       jobs of a Slurm cluster, by submitit
remote.py      the queue of a launcher whose cells run elsewhere
bases.py       one cell trains a base, the others of that base wait
deaths.py      why the process of a cell ended
"""
