"""``python -m jaxkfac``."""

import sys

from jaxkfac.jobs.cli import main

if __name__ == "__main__":
    sys.exit(main())
