"""Entry point of a function's image on AWS Lambda, ``python -m remora_adapters.aws_lambda``."""

from __future__ import annotations

import sys

from remora_adapters.aws_lambda import main

sys.exit(main())
