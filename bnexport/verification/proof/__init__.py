"""Prove folds where they happen: relate each value of the changed model to values of the original, and evaluate none.

A fold is correct if every value that leaves a changed part equals, up to the rounding of the stored weights, the same value of
the original as a function of the values that enter it. `search` walks both models in step and gives the verdict; `numbering` gives
equal values one number; `relations` writes the others as sums of per-channel maps of the original's values, as the table of
`lemmas` says for each operator (`movements`: for those that move elements); `weights` compares two linear operators weight by weight,
`branches` one operator with a sum of several. `sides` reads a model. Nothing here imports a rule, an edit or a search of the
folder; both read graphs with one reader.
"""

from __future__ import annotations
