"""Export of torch modules to ONNX, TorchScript and pt2."""

from bnexport.exporting.api import ExportResult, export

__all__ = ["ExportResult", "export"]
