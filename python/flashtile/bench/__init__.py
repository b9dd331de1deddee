"""Measures flashtile against PyTorch's attention, after checking that both are right.

`cases` says what is asked and `options` by which names, `columns` draws column masks, `suites` lists the shapes and
`drawn` draws others, `oracle` judges results, `peers` are who runs, `ragged` who runs on ragged batches, `decode` on
caches, `masked` on column masks and `rivals` on what was drawn, `found` who else runs where it is installed and
`further` if asked for, `timing` is how time is taken and `graphs` how calls are captured, `memory` how bytes are
counted and `profile` what looks into a call, `run` puts them together, `report` and `machine` write down what came out
and where, `cliffs` what is worst of it, `plots` draws it, `command` is the command line's way in.
"""
