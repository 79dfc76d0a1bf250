"""Demo of the sentence embedding example: compare sentences with the engine, without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from build import build

from remora import Engine

HERE = Path(__file__).resolve().parent
SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
MODELS = ("sentence_embedding", "sentence_embedding_bls")


def main() -> int:
    """Run the command line, whose option is the folder of the model repository."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, default=HERE / "models")
    models = parser.parse_args().models
    if not (models / "encoder" / "1" / "model.onnx").exists():
        build(models)
    with Engine(models) as engine:
        for name in MODELS:
            vectors = engine.infer(name, {"TEXT": [[sentence] for sentence in SENTENCES]})["EMBEDDING"]
            print(f"{name}: vectors {list(vectors.shape)}, cosine similarities")
            for sentence, row in zip(SENTENCES, np.round(vectors @ vectors.T, 3), strict=True):
                print(f"  {sentence:30} {'  '.join(f'{value:6.3f}' for value in row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
