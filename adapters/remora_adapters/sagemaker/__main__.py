"""``python -m remora_adapters.sagemaker serve``: what a SageMaker image has as its entry point."""

import sys

from remora_adapters.sagemaker import main

sys.exit(main())
