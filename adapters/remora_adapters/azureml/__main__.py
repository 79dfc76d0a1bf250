"""Entry point of an Azure ML deployment's server, ``python -m remora_adapters.azureml``."""

from __future__ import annotations

import sys

from remora_adapters.azureml import main

sys.exit(main())
