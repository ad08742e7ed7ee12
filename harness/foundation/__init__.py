"""Basics of any process: seeds, clocks, provenance, state files, logs. Nothing here knows of learning.

bytecode_cache.py   Python's byte code for installations that come without it
clock.py            wall time per stage of a step, and peaks of GPU memory
data_hash.py        hash of a data set: a file, or a folder of them
did_you_mean.py     names in error messages: the nearest valid ones, and long lists cut short
digits.py           floats of a few significant digits
duration.py         a duration in words
json_object.py      a file that holds one JSON object, read with an error of one line
life.py             signs of life of a cell between its steps
local_port.py       ports that are free for a server
lock_file.py        lock files that processes wait for
markdown_table.py   tables of Markdown, for pages of results
number_cell.py      numbers as cells of tables, a dash where there is none
own_process.py      a module of this project started in a Python process of its own
process_log.py      the line of a dead process's log that names the error
progress_bar.py     a bar on the terminal over things that take a while
project_files.py    sweeps, claims and committed results: in a clone, or as the installed package carries them
provenance.py       commit, package versions, hardware and memory of a run
root_cause.py       the error at the bottom of a chain, in one line
seeds.py            seeds as stable hashes of what they are for
span.py             a range of numbers in words
state_files.py      tensors and plain values on disk, written atomically, read without executing anything
text_table.py       tables of plain text, as wide as the terminal
time_stamp.py       time stamps of records
visible_gpus.py     names of the GPUs that a process may use
whole_file.py       files that appear whole or not at all
whole_folder.py     folders that appear whole or not at all
writable.py         whether a folder can be written, asked before the work
"""
