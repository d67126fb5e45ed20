import sys
from pathlib import Path

# The oracle and the one-node models are shared with the tests of the custom operators.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "custom_ops"))
