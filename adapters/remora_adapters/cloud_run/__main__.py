"""Entry point of a server on Google Cloud Run, ``python -m remora_adapters.cloud_run``."""

from __future__ import annotations

import sys

from remora_adapters.cloud_run import main

sys.exit(main())
