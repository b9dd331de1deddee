"""Measures flashtile against PyTorch's attention, after checking that both are right.

`cases` says what is asked, `suites` lists the shapes, `oracle` judges results, `peers` are who runs, `ragged` who runs
on ragged batches and `decode` on caches, `found` who else runs where it is installed and `further` if asked for,
`timing` is how time is taken, `memory` how bytes are counted and `profile` what looks into a call, `run` puts them
together, `report` and `machine` write down what came out and where, `plots` draws it, `command` is the command line's
way in.
"""
