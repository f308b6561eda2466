"""`python -m mx_trainer` is `mx-train`."""

import sys

from mx_trainer.cli import train

sys.exit(train())
