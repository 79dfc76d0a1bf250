"""Entry point of a server on Vertex AI, ``python -m remora_adapters.vertex``."""

from __future__ import annotations

import sys

from remora_adapters.vertex import main

sys.exit(main())
