"""Prove folds where they happen: compare the regions that changed, in float64, and everything else byte by byte.

A fold is correct if every value that leaves a changed region equals, up to the rounding of the stored weights, the same
value of the original as a function of the values that enter the region. `search` reads both models from their inputs
downwards, gives equal values one number (`numbering`), cuts the regions out between them (`regions`; `claims` says where a
report or a certificate puts them) and gives the verdict; `chains` proves a linear operator between per-channel maps
weight by weight, streamed; `evaluation` evaluates all other regions as affine forms, at small sizes where these stand for
all (`layouts`). Nothing here imports a rule, an edit or a search of the folder; both read graphs with one reader.
"""

from __future__ import annotations
