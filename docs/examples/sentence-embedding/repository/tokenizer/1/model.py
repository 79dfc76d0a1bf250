"""Text to token ids: TEXT [n, 1] BYTES -> input_ids and attention_mask [n, longest text] INT64."""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.tokenizer.enable_truncation(max_length=int(parameters["max_tokens"]["string_value"]))
        self.tokenizer.enable_padding()  # to the longest text of the call
        pb_utils.Logger.log_info(f"a vocabulary of {self.tokenizer.get_vocab_size()} tokens")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)
        try:
            words = [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"TEXT is not UTF-8: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        encoded = self.tokenizer.encode_batch(words)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("input_ids", np.array([row.ids for row in encoded], np.int64)),
                pb_utils.Tensor("attention_mask", np.array([row.attention_mask for row in encoded], np.int64)),
            ]
        )
