"""Prove folds where they happen: compare the regions that changed, in float64, and everything else byte by byte.

A fold is correct if every value that leaves a changed region equals, up to the rounding of the stored weights, the same
value of the original as a function of the values that enter the region. `pairing` matches all nodes that no site of the
report names and cuts the regions out; `chains` proves a linear operator between per-channel maps weight by weight,
streamed; `regions` evaluates all other regions as affine forms; `check` gives the verdict. Nothing here imports the
folder or the helpers that it edits graphs with.
"""
