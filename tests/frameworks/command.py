"""bnexport's command line with the stand-ins of compiled parts: python -m tests.frameworks.command ARGUMENTS."""

import sys

from bnexport.cli import main
from tests.frameworks import stand_ins

if __name__ == "__main__":
    stand_ins.install()
    sys.argv[0] = "bnexport"
    sys.exit(main())
