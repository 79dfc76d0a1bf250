"""Entry point of a KServe predictor, ``python -m remora_adapters.kserve``."""

from __future__ import annotations

import sys

from remora_adapters.kserve import main

sys.exit(main())
