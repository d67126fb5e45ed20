"""Sync batch norm for PyTorch."""

from bnexport.sync_bn.convert import convert_sync_batchnorm, revert_sync_batchnorm
from bnexport.sync_bn.module import SyncBatchNorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm", "revert_sync_batchnorm"]
