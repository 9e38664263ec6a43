"""`python -m regauge`."""

import sys

from regauge.cli import main

sys.exit(main())
