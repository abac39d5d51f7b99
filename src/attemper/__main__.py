"""`python -m attemper` is the command `attemper`."""

import sys

from attemper.cli import main

if __name__ == "__main__":
    sys.exit(main())
