"""Export of torch modules to ONNX."""

from bnexport.exporting.api import ExportResult, export

__all__ = ["ExportResult", "export"]
