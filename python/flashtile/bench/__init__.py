"""Measures flashtile against PyTorch's attention, after checking that both are right.

`cases` says what is asked, `suites` lists the shapes, `oracle` judges results, `peers` are who runs, `ragged` who runs
on ragged batches and `decode` on caches, `further` who else runs if asked for, `timing` is how time is taken, `run`
puts them together, `report` and `machine` write down what came out and where, `command` is the command line's way in.
"""
