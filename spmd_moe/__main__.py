"""`python -m spmd_moe` is `spmd-moe`."""

import sys

from spmd_moe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
