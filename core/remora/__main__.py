"""`python -m remora` is `remora`."""

import sys

from remora.cli import main

sys.exit(main())
