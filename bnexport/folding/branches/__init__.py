"""Merge sums of parallel linear branches of one value into one convolution or matrix product."""

from __future__ import annotations
