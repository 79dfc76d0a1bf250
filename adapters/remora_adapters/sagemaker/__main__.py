"""Entry point of a SageMaker image, ``python -m remora_adapters.sagemaker serve``."""

import sys

from remora_adapters.sagemaker import main

sys.exit(main())
