"""Builder of the digits example: train a classifier and write it as a model repository without configuration.

    models/digits/labels.txt     one name for each class, in the model's order
    models/digits/1/model.onnx   image [batch, 64] FP32 -> probabilities [batch, 10] FP32
    requests/seven.json ...      V2 requests: one image of each digit from the test set

The images are the 8 x 8 handwritten digits that come with scikit-learn, with pixels from 0 (paper) to 16 (ink). Nothing
is downloaded. The same seed gives the same model on every machine with the same library versions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from onnx import ModelProto
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler
from threadpoolctl import threadpool_limits

MODEL = "digits"
LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SEED = 7
PIXELS = 64


def train() -> tuple[Pipeline, list[list[float]], list[int]]:
    """Return a trained pipeline, and the images and digits of the test set."""
    images, digits = load_digits(return_X_y=True)
    seen, unseen, seen_digits, unseen_digits = train_test_split(
        images, digits, test_size=0.2, random_state=SEED, stratify=digits
    )
    classifier = MLPClassifier((64,), max_iter=400, random_state=SEED)
    pipeline = make_pipeline(MinMaxScaler(), classifier)
    with threadpool_limits(1):  # because with small matrices more threads only wait for each other
        pipeline.fit(seen, seen_digits)
    print(
        f"trained on {len(seen)} images; right on {pipeline.score(unseen, unseen_digits):.1%} of {len(unseen)} others"
    )
    return pipeline, unseen.tolist(), unseen_digits.tolist()


def export(pipeline: Pipeline) -> ModelProto:
    """Return the pipeline as ONNX with one input, ``image``, and one output, ``probabilities``.

    ``zipmap`` would make the output a list of dictionaries, which tensor protocols cannot transfer.
    """
    classifier = pipeline.steps[-1][1]
    model: ModelProto = to_onnx(
        pipeline,
        initial_types=[("image", FloatTensorType([None, PIXELS]))],
        options={id(classifier): {"zipmap": False, "output_class_labels": False}},
    )
    probabilities = next(output for output in model.graph.output if output.name == "probabilities")
    del model.graph.output[:]
    model.graph.output.append(probabilities)
    return model


def request_of(image: list[float]) -> dict[str, object]:
    """Return the body of a V2 inference request for the three likeliest classes."""
    return {
        "inputs": [{"name": "image", "shape": [1, PIXELS], "datatype": "FP32", "data": image}],
        "outputs": [{"name": "probabilities", "parameters": {"classification": 3}}],
    }


def build(models: Path) -> None:
    """Write the repository, the model file last so that its existence marks a complete build."""
    pipeline, images, digits = train()
    requests = models.parent / "requests"
    requests.mkdir(parents=True, exist_ok=True)
    for digit, name in enumerate(LABELS):
        image = images[digits.index(digit)]
        (requests / f"{name}.json").write_text(json.dumps(request_of(image)))
    version = models / MODEL / "1"
    version.mkdir(parents=True, exist_ok=True)
    (models / MODEL / "requests").mkdir(exist_ok=True)
    shutil.copy(requests / "seven.json", models / MODEL / "requests")  # the first value in the form of the page
    (models / MODEL / "labels.txt").write_text("\n".join(LABELS) + "\n")
    unfinished = version / "model.onnx.part"
    unfinished.write_bytes(export(pipeline).SerializeToString())
    unfinished.rename(version / "model.onnx")


def main() -> int:
    """Run the command line, whose option is the folder of the model repository."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, default=Path(__file__).parent / "models")
    build(parser.parse_args().models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
