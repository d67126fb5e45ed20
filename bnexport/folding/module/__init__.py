"""Folding of batch norms in torch modules. It needs torch; the rest of bnexport.folding does not."""

from bnexport.folding.module.api import fold_copy, fold_module
from bnexport.folding.module.edits import ModuleOptions

__all__ = ["ModuleOptions", "fold_copy", "fold_module"]
