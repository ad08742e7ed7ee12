"""The harness on itself: benches, fault injection, the map of the rooms, and the environment's setup.

bench/         measurements of speed, simulations of the statistics
faults/        sweeps under faults, audited
room_map.py    the picture and the table of the rooms
longest.py     the longest files and functions
lock.py        the lock files of `requirements/`
setup_env.py   a virtual environment, made or refreshed
"""
