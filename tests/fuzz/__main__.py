"""`make fuzz`: see `fuzzing`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fuzzing import main

sys.exit(main())
